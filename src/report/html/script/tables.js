// Tables: sorted by a click on a heading, filtered by a word.

function makeSortable(table) {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, place) => {
    const button = html('button', { type: 'button' }, ...heading.childNodes);
    heading.append(button);
    button.addEventListener('click', () => {
      const isNumber = heading.classList.contains('number');
      const before = heading.getAttribute('aria-sort');
      const order = before === 'ascending' || (!before && isNumber) ? 'descending' : 'ascending';
      headings.forEach((other) => other.removeAttribute('aria-sort'));
      heading.setAttribute('aria-sort', before === 'descending' ? 'ascending' : order);
      table.classList.add('sorted');
      sortRows(body, place, heading.getAttribute('aria-sort') === 'ascending' ? 1 : -1);
    });
  });
}

/** Empty cells come last in both directions. */
function sortRows(body, place, sign) {
  const keyed = [...body.rows].map((row) => {
    const value = row.cells[place].dataset.value;
    return { row, value, number: value === '' ? NaN : Number(value) };
  });
  const numeric = keyed.every(({ value, number }) => value === '' || !Number.isNaN(number));
  keyed.sort((a, b) => {
    if (!a.value || !b.value) return Number(!a.value) - Number(!b.value);
    return sign * (numeric ? a.number - b.number : a.value.localeCompare(b.value, 'en', { numeric: true }));
  });
  body.append(...keyed.map(({ row }) => row));
}

function makeFilterable(table) {
  const field = html('input', { type: 'search', placeholder: 'workload or strategy' });
  const label = html('label', { class: 'filter' }, 'Show rows with', field);
  field.addEventListener('input', () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of table.tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
  table.closest('.table').before(label);
}

