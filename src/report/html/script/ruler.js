// Card sizes as a ruler, with the bars of programs on it.

/**
 * `needed`: the bars, as { name, kib, fits }. `kib` is the memory that the program takes, in KiB; `fits` is true, false or null where
 * it is not known or not asked: then the bar is compared with every card. `cards`: { name, kib }, where `kib` is what a program may
 * take of the card: without context and libraries. Cards far beyond the longest bar are left out.
 */
function drawRuler(host, { needed, cards }) {
  const words = needed.map(({ name, kib }) => `${name} ${bytes(kib)}`).join(', ');
  return new Sheet(host, { label: `Memory needed, on a ruler of card sizes: ${words}. Arrow keys read values.`, draw: (sheet) => rulerOn(sheet, needed, groupedCards(cards)) });
}

/** Cards whose sizes cannot be told apart, the smallest first: { kib, names }. */
function groupedCards(cards) {
  const sizes = [];
  for (const { name, kib } of [...cards].sort((a, b) => a.kib - b.kib)) {
    const last = sizes[sizes.length - 1];
    if (last && kib <= last.kib * 1.02) last.names.push(name);
    else sizes.push({ kib, names: [name] });
  }
  return sizes;
}

function rulerOn(sheet, needed, sizes) {
  const longest = Math.max(1, ...needed.map(({ kib }) => kib));
  // One size beyond the longest bar shows what would be enough.
  const beyond = sizes.find(({ kib }) => kib >= longest);
  const highest = Math.max(longest, beyond ? beyond.kib : 0) * 1.08;
  const shown = sizes.filter(({ kib }) => kib <= highest);
  const narrow = sheet.width < 500;
  const left = 8;
  const right = sheet.width - 8;
  const x = (kib) => left + (kib / highest) * (right - left);
  const rowHeight = 46;
  const { rows, places } = cardLabels(shown, x, right, narrow);
  const top = 14 + rows * 16 + 10;
  const floor = top + needed.length * rowHeight + 6;
  for (const tick of memoryTicks(highest, narrow ? 3 : 7)) {
    svg('line', { class: 'grid', x1: x(tick), x2: x(tick), y1: top, y2: floor }, sheet.root);
    svg('line', { class: 'axis', x1: x(tick), x2: x(tick), y1: floor, y2: floor + 5 }, sheet.root);
    const anchor = tick === 0 ? 'start' : x(tick) > right - 24 ? 'end' : 'middle';
    svg('text', { x: x(tick), y: floor + 19, 'text-anchor': anchor }, sheet.root).textContent = bytes(tick);
  }
  svg('line', { class: 'axis', x1: left, x2: right, y1: floor, y2: floor }, sheet.root);
  svg('text', { x: (left + right) / 2, y: floor + 37, 'text-anchor': 'middle' }, sheet.root).textContent = narrow ? 'dashed: what cards have for a program' : 'memory that the program takes; dashed: what cards have left for it';
  needed.forEach(({ kib, fits }, place) => {
    const state = fits === false ? 'lacks' : fits === true ? 'fits' : 'open';
    svg('rect', { class: `ruler-bar ${state}`, x: left, y: top + place * rowHeight + 20, width: Math.max(1, x(kib) - left), height: 20, rx: 2 }, sheet.root);
  });
  // Lines of cards lie over the bars and below all texts.
  shown.forEach(({ kib }, place) => svg('line', { class: 'ruler-card', x1: x(kib), x2: x(kib), y1: 18 + places[place].row * 16, y2: floor }, sheet.root));
  needed.forEach((bar, place) => {
    const y = top + place * rowHeight;
    const enough = sizes.find(({ kib }) => kib >= bar.kib);
    const fits = bar.fits ?? null;
    const verdict = fits === false ? '✗ does not fit' : fits === true ? '✓ fits' : enough ? `the smallest card that holds it: ${enough.names[0]}` : 'no card here holds it';
    // A long name is cut at its end: on a phone the verdict comes before it.
    const text = narrow ? `${bytes(bar.kib)}, ${verdict}: ${bar.name}` : `${bar.name}: ${bytes(bar.kib)}, ${verdict}`;
    svg('text', { class: 'strong', x: left, y: y + 14 }, sheet.root).textContent = fitted(text, right - left);
    const rowsOf = [['memory', bytes(bar.kib)], ['verdict', verdict]];
    if (enough) rowsOf.push([`left on ${enough.names[0]}`, bytes(enough.kib - bar.kib)]);
    sheet.mark(x(bar.kib), y + 30, bar.name, rowsOf);
  });
  shown.forEach(({ kib, names }, place) => {
    const { row, text, anchor } = places[place];
    const y = 14 + row * 16;
    svg('text', { x: anchor === 'end' ? x(kib) + 2 : x(kib), y, 'text-anchor': anchor }, sheet.root).textContent = text;
    sheet.mark(x(kib), y, names.join(', '), [['left for the program', bytes(kib)]]);
  });
  return floor + 46;
}

/** A row for each label of a card so that no two of a row overlap. */
function cardLabels(sizes, x, right, narrow) {
  const ends = [];
  const places = sizes.map(({ kib, names }) => {
    const text = names.length > 1 && !narrow ? `${names[0]} +${names.length - 1}` : names[0];
    const half = textWidth(text) / 2 + 5;
    const anchor = x(kib) + half > right ? 'end' : 'middle';
    const from = anchor === 'end' ? x(kib) - 2 * half : x(kib) - half;
    let row = ends.findIndex((end) => end < from);
    if (row < 0) row = ends.push(0) - 1;
    ends[row] = from + 2 * half;
    return { row, text, anchor };
  });
  return { rows: Math.max(1, ends.length), places };
}

