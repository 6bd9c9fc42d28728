// Tables: sorted by a click on a heading, filtered by words. Of a long table only some rows are elements; the others are made when
// the reader comes to them, so a page of many thousand rows opens at once.

/** Rows that are made at a time. */
const ROWS_AT_ONCE = 100;
/** More rows of a table are not printed. */
const PRINTED_ROWS = 500;

class Table {
  constructor(table) {
    this.table = table;
    this.body = table.tBodies[0];
    this.headings = [...table.tHead.rows[0].cells];
    this.name = table.caption.textContent.toLowerCase().replace(/[^a-z0-9]+/g, '-');
    this.rows = [...this.body.rows].map((element) => ({ element }));
    this.listed = this.rows;
    this.shown = this.rows.length;
    const box = table.closest('.table');
    const packed = box.querySelector('script.rows');
    this.packed = canUnpack ? packed : null;
    // Without the further rows, the note of the page stays.
    this.isWhole = canUnpack || !packed;
    this.note = box.querySelector('.more') || box.appendChild(html('p', { class: 'note more', hidden: '' }));
    if (this.rows.length > 1) this.makeSortable();
    if (this.packed) {
      new IntersectionObserver((entries) => {
        if (entries.some((entry) => entry.isIntersecting)) this.load().then(() => this.show(this.shown + ROWS_AT_ONCE));
      }, { root: box, rootMargin: '400px' }).observe(this.note);
    }
  }

  /** Reads the rows that are not elements yet. */
  load() {
    this.loading ||= this.packed
      ? unpacked(this.packed).then(({ classes, rows }) => {
        this.packed.remove();
        this.rows.push(...rows.map(([id, ...cells]) => ({ id, cells, classes })));
      })
      : Promise.resolve();
    return this.loading;
  }

  value(row, place) {
    if (row.element) return row.element.cells[place].dataset.value;
    const cell = row.cells[place];
    return typeof cell === 'string' ? cell : cell[1];
  }

  text(row) {
    const parts = () => row.cells.map((cell) => (typeof cell === 'string' ? cell : cell[0]).replace(/<[^>]*>/g, ''));
    row.text ||= (row.element ? row.element.textContent : parts().join(' ')).toLowerCase();
    return row.text;
  }

  element(row) {
    row.element ||= (() => {
      const element = html('tr', row.id ? { 'data-case': row.id } : {});
      row.cells.forEach((cell, place) => {
        const [inner, value, own] = typeof cell === 'string' ? [cell, cell] : cell;
        const made = html(place ? 'td' : 'th', { ...(place ? {} : { scope: 'row' }), 'data-value': value });
        made.className = own ?? row.classes[place];
        // The page escaped it.
        made.innerHTML = inner;
        element.append(made);
      });
      return element;
    })();
    return row.element;
  }

  /** Shows the first of the listed rows. */
  show(most) {
    const wanted = this.listed.slice(0, most).map((row) => this.element(row));
    this.shown = most;
    // Rows with the same first cell belong together.
    wanted.forEach((element, place) => {
      element.classList.toggle('again', place > 0 && wanted[place - 1].cells[0].dataset.value === element.cells[0].dataset.value);
    });
    this.body.replaceChildren(...wanted);
    if (!this.isWhole) return;
    const all = this.rows.length;
    const parts = [];
    if (this.listed.length < all) parts.push(`${count(this.listed.length)} of ${count(all)} rows have these words.`);
    if (wanted.length < this.listed.length) parts.push(`${count(wanted.length)} of ${count(this.listed.length)} rows are shown; scroll for more.`);
    this.note.textContent = parts.join(' ');
    this.note.hidden = !parts.length;
  }

  async filter(words) {
    await this.load();
    this.words = words;
    this.list();
  }

  async sort(column, direction) {
    const place = this.headings.findIndex((heading) => heading.dataset.column === column);
    if (place < 0) return;
    await this.load();
    this.headings.forEach((heading) => heading.removeAttribute('aria-sort'));
    this.headings[place].setAttribute('aria-sort', direction);
    this.table.classList.add('sorted');
    this.order = sortedBy(this.rows, (row) => this.value(row, place), direction === 'ascending' ? 1 : -1);
    pageState.set(`sort-${this.name}`, `${column}.${direction}`);
    this.list();
  }

  list() {
    const words = this.words || [];
    this.listed = (this.order || this.rows).filter((row) => words.every((word) => this.text(row).includes(word)));
    this.show(ROWS_AT_ONCE);
  }

  makeSortable() {
    this.headings.forEach((heading) => {
      const button = html('button', { type: 'button' }, ...heading.childNodes);
      heading.append(button);
      button.addEventListener('click', () => {
        const before = heading.getAttribute('aria-sort');
        const first = heading.classList.contains('number') ? 'descending' : 'ascending';
        const other = before === 'ascending' ? 'descending' : 'ascending';
        this.sort(heading.dataset.column, before ? other : first);
      });
    });
    rove(this.table.tHead.rows[0]);
    const stored = pageState.get(`sort-${this.name}`);
    if (stored) this.sort(...stored.split('.'));
  }
}

/** Empty values come last in both directions. */
function sortedBy(rows, valueOf, sign) {
  const keyed = rows.map((row) => {
    const value = valueOf(row);
    return { row, value, number: value === '' ? NaN : Number(value) };
  });
  const numeric = keyed.every(({ value, number }) => value === '' || !Number.isNaN(number));
  const order = new Intl.Collator('en', { numeric: true });
  keyed.sort((a, b) => {
    if (!a.value || !b.value) return Number(!a.value) - Number(!b.value);
    return sign * (numeric ? a.number - b.number : order.compare(a.value, b.value));
  });
  return keyed.map(({ row }) => row);
}

/** All tables, and one field that filters them. */
function makeTables() {
  const tables = [...document.querySelectorAll('table.sortable')].map((table) => new Table(table));
  const long = tables.filter(({ table }) => table.hasAttribute('data-filter'));
  const field = document.getElementById('filter');
  const filter = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    pageState.set('filter', field.value.trim() || null);
    long.forEach((table) => table.filter(words));
  };
  field.value = pageState.get('filter') || '';
  if (field.value) filter();
  field.addEventListener('input', filter);
  field.parentElement.hidden = !long.length;
  window.addEventListener('beforeprint', () => tables.forEach((table) => {
    if (table.rows.length > table.shown) table.show(PRINTED_ROWS);
  }));
  return tables;
}

