// Techniques: memory against the time of a step, one mark for each, and what is published beside what this run shows.

function drawTechniques(host, chart) {
  const chosen = chart.models.findIndex((model) => model.name === pageState.get('model'));
  let model = chart.models[Math.max(0, chosen)];
  const sheets = html('div', { class: 'techniques' });
  const answer = host.closest('figure').previousElementSibling;
  const show = () => {
    // The sentence is about the model that is shown. It comes from the page itself, as HTML.
    answer.innerHTML = model.sentence;
    const [plane, ranges] = [html('div', { class: 'plane' }), html('div', { class: 'ranges' })];
    const judged = model.dots.filter((dot) => dot.published && dot.saved !== null);
    sheets.replaceChildren(plane, ...(judged.length > 0 ? [ranges] : []));
    const label = (what) => `${what} on ${model.name}. Arrow keys read values.`;
    new Sheet(plane, { label: label('Peak of reserved memory against the time of a step'), draw: (sheet) => planeOn(sheet, model) });
    if (judged.length > 0) new Sheet(ranges, { label: label('Memory saved, published and in this run'), draw: (sheet) => rangesOn(sheet, judged) });
  };
  if (chart.models.length > 1) {
    const choices = chart.models.map(({ name }) => [name, name]);
    const controls = html('div', { class: 'controls' }, segmented('Model', choices, model.name, (name) => {
      model = chart.models.find((other) => other.name === name);
      pageState.set('model', name);
      show();
    }));
    host.append(controls);
  }
  host.append(sheets);
  show();
}

/** Rows of a readout. */
function techniqueRows(dot) {
  const rows = [['reserved', `${bytes(dot.reserved)}, ${Math.round(dot.memory * 100)} % of the base`], ['time of a step', `${dot.time.toFixed(2)} of the base`]];
  if (dot.interval) rows.push(['95 % interval', `${dot.interval[0].toFixed(2)} to ${dot.interval[1].toFixed(2)}`]);
  const effects = { same: 'as in the base', rounding: 'rounding differs', training: 'the training result can change', '': 'not recorded' };
  rows.push(['numerics', effects[dot.numerics]]);
  if (dot.less_work) rows.push(['work of a step', 'less than in the base']);
  if (dot.saved !== null) rows.push(['allocated memory saved', `${dot.saved.toFixed(1)} %`]);
  if (dot.published) rows.push(['published', `${dot.published[0]} to ${dot.published[1]} %`]);
  return rows;
}

/** The dots that no other is better than in both directions, of those with all the work and the same training. */
function front(dots) {
  const comparable = dots.filter((dot) => !dot.less_work && dot.numerics !== 'training');
  const beaten = (dot) => comparable.some((other) => other.memory <= dot.memory && other.time <= dot.time && (other.memory < dot.memory || other.time < dot.time));
  return comparable.filter((dot) => !beaten(dot)).sort((a, b) => a.time - b.time || b.memory - a.memory);
}

/** Draws the sign of a technique: filled, hollow or square by its effect on numbers, a cross for less work. */
function techniqueSign(parent, dot, x, y, isBase = false) {
  if (dot.less_work) return svg('path', { class: 'sign less', d: `M${x - 4} ${y - 4}l8 8m0 -8l-8 8` }, parent);
  if (isBase) return svg('rect', { class: 'sign base', x: x - 5, y: y - 5, width: 10, height: 10 }, parent);
  if (dot.numerics === 'training') return svg('circle', { class: 'sign training', cx: x, cy: y, r: 4.5 }, parent);
  if (dot.numerics === 'rounding') return svg('path', { class: 'sign rounding', d: `M${x} ${y - 6}l5.5 10h-11Z` }, parent);
  return svg('circle', { class: 'sign same', cx: x, cy: y, r: 5 }, parent);
}

function planeOn(sheet, model) {
  const narrow = sheet.width < 460;
  const [left, right, top] = [46, sheet.width - 14, 26];
  const floor = narrow ? 330 : 400;
  const times = model.dots.map((dot) => dot.time);
  const [fast, slow] = [Math.min(...times) / 1.12, Math.max(...times) * 1.25];
  const most = Math.max(1.04, ...model.dots.map((dot) => dot.memory)) + 0.03;
  const least = Math.max(0, Math.min(...model.dots.map((dot) => dot.memory)) - 0.06);
  const x = (time) => left + (Math.log(time / fast) / Math.log(slow / fast)) * (right - left);
  const y = (memory) => floor - ((memory - least) / (most - least)) * (floor - top);
  const steps = [0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 20, 50].filter((tick) => tick >= fast && tick <= slow);
  for (const tick of sparse(steps, x, 34)) {
    svg('line', { class: tick === 1 ? 'bound' : 'grid', x1: x(tick), x2: x(tick), y1: top, y2: floor }, sheet.root);
    svg('text', { x: x(tick), y: floor + 16, 'text-anchor': 'middle' }, sheet.root).textContent = `${tick}×`;
  }
  for (const tick of ticks(Math.ceil(least * 100), most * 100, 6)) {
    svg('line', { class: tick === 100 ? 'bound' : 'grid', x1: left, x2: right, y1: y(tick / 100), y2: y(tick / 100) }, sheet.root);
    svg('text', { x: left - 6, y: y(tick / 100) + 4, 'text-anchor': 'end' }, sheet.root).textContent = `${Math.round(tick)} %`;
  }
  svg('text', { class: 'strong', x: 2, y: 12 }, sheet.root).textContent = fitted('peak of reserved memory, % of the base', sheet.width);
  svg('text', { class: 'strong', x: (left + right) / 2, y: floor + 34, 'text-anchor': 'middle' }, sheet.root).textContent = 'time of a step, base = 1 (log)';
  const best = front(model.dots);
  if (best.length > 1) svg('path', { class: 'front', d: best.map((dot, place) => `${place ? `H${x(dot.time)}V` : `M${x(dot.time)} `}${y(dot.memory)}`).join('') }, sheet.root);
  const boxes = model.dots.map((dot) => ({ x: x(dot.time) - 6, y: y(dot.memory) - 6, width: 12, height: 12 }));
  // The base lies above the dots that are equal to it.
  for (const dot of [...model.dots].reverse()) techniqueSign(sheet.root, dot, x(dot.time), y(dot.memory), dot.id === 'base');
  // The base and the front first: their labels matter most.
  const order = [...model.dots].sort((a, b) => (b.id === 'base') - (a.id === 'base') || best.includes(b) - best.includes(a) || a.memory - b.memory);
  for (const dot of order) {
    const [cx, cy] = [x(dot.time), y(dot.memory)];
    const isBase = dot.id === 'base';
    sheet.mark(cx, cy, `${dot.title} (${dot.id})`, techniqueRows(dot));
    const place = freePlace(boxes, cx, cy, textWidth(dot.id, '11px system-ui, sans-serif'), { left: 2, right: sheet.width - 2, top, floor }, isBase || best.includes(dot));
    if (!place) continue;
    boxes.push(place);
    if (place.far) svg('line', { class: 'leader', x1: cx, y1: cy, x2: Math.min(Math.max(cx, place.x), place.x + place.width), y2: place.y > cy ? place.y : place.y + place.height }, sheet.root);
    svg('text', { class: best.includes(dot) || isBase ? 'small strong' : 'small', x: place.x, y: place.y + 10 }, sheet.root).textContent = dot.id;
  }
  const keysTop = floor + 54;
  const keys = [[{ numerics: 'same' }, 'same numerics'], [{ numerics: 'rounding' }, 'changes rounding'], [{ numerics: 'training' }, 'can change the training result'], [{ less_work: true }, 'computes less in a step']];
  let [at, row] = [8, 0];
  for (const [sample, text] of keys.filter(([sample]) => model.dots.some((dot) => (sample.less_work ? dot.less_work : !dot.less_work && (dot.numerics || 'same') === sample.numerics)))) {
    const words = sample.numerics === 'same' && model.dots.every((dot) => dot.numerics === '') ? 'effect on numerics not recorded' : text;
    const width = textWidth(words) + 34;
    if (at + width > sheet.width) [at, row] = [8, row + 1];
    techniqueSign(sheet.root, sample, at, keysTop + row * 18 - 4);
    svg('text', { x: at + 10, y: keysTop + row * 18 }, sheet.root).textContent = words;
    at += width;
  }
  return keysTop + row * 18 + 8;
}

/** A place for a label that touches no box: beside the dot, or further away if it may be. Null if there is none. */
function freePlace(boxes, x, y, width, { left, right, top, floor }, mayBeFar) {
  const height = 13;
  const touches = (one, other) => one.x < other.x + other.width && other.x < one.x + one.width && one.y < other.y + other.height && other.y < one.y + one.height;
  const offsets = [[8, -height / 2], [8, -height - 1], [8, 1], [-width - 8, -height / 2], [-width - 8, -height - 1], [-width - 8, 1], [-width / 2, -height - 7], [-width / 2, 7]];
  // Further away, with a line to the dot.
  const far = (mayBeFar ? [20, -33, 36, -49] : []).flatMap((dy) => [[6, dy], [-width - 6, dy], [-width / 2, dy]]);
  for (const [dx, dy, isFar] of [...offsets, ...far.map((offset) => [...offset, true])]) {
    const box = { x: x + dx, y: y + dy, width, height, far: isFar };
    if (box.x < left || box.x + width > right || box.y < top || box.y + height > floor) continue;
    if (!boxes.some((other) => touches(box, other))) return box;
  }
  return null;
}

/** The published range as a band, the saving of this run as a dot, one row for each technique. */
function rangesOn(sheet, dots) {
  const rows = [...dots].sort((a, b) => b.saved - a.saved);
  const font = '11px system-ui, sans-serif';
  const room = Math.min(sheet.width * 0.42, Math.max(...rows.map((dot) => textWidth(dot.id, font))) + 8);
  const [left, right, top] = [room, sheet.width - 10, 26];
  const pitch = Math.max(13, Math.min(20, 374 / rows.length));
  const floor = top + rows.length * pitch;
  const low = Math.min(0, ...rows.map((dot) => dot.saved));
  const high = Math.max(...rows.map((dot) => Math.max(dot.saved, dot.published[1])));
  const x = (percent) => left + ((percent - low) / (high - low)) * (right - left);
  svg('text', { class: 'strong', x: 0, y: 12 }, sheet.root).textContent = fitted('allocated memory saved: band published, dot in this run', sheet.width);
  for (const tick of ticks(low, high, 4)) {
    svg('line', { class: 'grid', x1: x(tick), x2: x(tick), y1: top, y2: floor }, sheet.root);
    svg('text', { x: x(tick), y: floor + 16, 'text-anchor': 'middle' }, sheet.root).textContent = `${tick}`;
  }
  svg('text', { class: 'strong', x: (left + right) / 2, y: floor + 34, 'text-anchor': 'middle' }, sheet.root).textContent = fitted('% of allocated memory', right - left);
  rows.forEach((dot, place) => {
    const y = top + (place + 0.5) * pitch;
    const [from, to] = dot.published;
    const inside = dot.saved >= from && dot.saved <= to;
    svg('text', { class: 'small', x: left - 6, y: y + 4, 'text-anchor': 'end' }, sheet.root).textContent = fitted(dot.id, room - 8, font);
    svg('rect', { class: 'published', x: x(from), y: y - pitch / 2 + 2, width: x(to) - x(from), height: pitch - 4, rx: 2 }, sheet.root);
    svg('circle', { class: inside ? 'measured' : 'measured outside', cx: x(dot.saved), cy: y, r: 4 }, sheet.root);
    sheet.mark(x(dot.saved), y, `${dot.title} (${dot.id})`, techniqueRows(dot));
  });
  return floor + 42;
}

