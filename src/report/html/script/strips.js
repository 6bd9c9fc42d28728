// Strips: one row for each strategy, one dot for each workload, on a logarithmic axis.

/** Dispatches the charts of first screens. */
function drawFirst(host, chart, data) {
  if (chart.kind === 'strips') drawStrips(host, chart, data);
  if (chart.kind === 'techniques') drawTechniques(host, chart);
}

const RATIO_TICKS = [1, 1.1, 1.25, 1.5, 2, 3, 5, 7, 10, 20, 30, 50, 70, 100, 200, 300, 500, 1000];
const TIME_TICKS = Array.from({ length: 30 }, (_, place) => [1, 2, 5][place % 3] * 10 ** Math.floor(place / 3));

/** How values of a chart are written: multiples, or nanoseconds. */
function stripText(unit) {
  if (unit === 'nanoseconds') {
    return (value) => {
      const [size, name] = [[1e9, 's'], [1e6, 'ms'], [1e3, 'µs'], [1, 'ns']].find(([size]) => value >= size) || [1, 'ns'];
      return `${Number((value / size).toPrecision(2))} ${name}`;
    };
  }
  return (value) => `${value < 10 ? Number(value.toFixed(2)) : value < 100 ? Number(value.toFixed(1)) : count(value)}×`;
}

function drawStrips(host, chart, data) {
  const names = chart.rows.map((row) => data.strategies[row.strategy]).join(', ');
  return new Sheet(host, {
    label: `${chart.axis}, one row for each strategy, the best first: ${names}. Arrow keys read dots, Enter goes to the case.`,
    draw: (sheet) => stripsOn(sheet, chart, data),
  });
}

/** A number between -1 and 1 that depends on the place only: a redrawn chart looks the same. */
function scatter(place) {
  const wave = Math.sin((place + 1) * 12.9898) * 43758.5453;
  return 2 * (wave - Math.floor(wave)) - 1;
}

/** Ticks that are at least `apart` pixels from each other. */
function sparse(ticksOf, x, apart) {
  const kept = [];
  for (const tick of ticksOf) if (kept.length === 0 || x(tick) - x(kept[kept.length - 1]) >= apart) kept.push(tick);
  return kept;
}

function stripsOn(sheet, chart, data) {
  const narrow = sheet.width < 640;
  const text = stripText(chart.unit);
  const font = '12px system-ui, sans-serif';
  const hasTime = chart.time_axis !== '';
  const nameRoom = narrow ? 0 : Math.min(260, 20 + Math.max(...chart.rows.map((row) => textWidth(data.strategies[row.strategy], font))));
  const timeRoom = hasTime && !narrow ? 190 : 0;
  const left = narrow ? 10 : nameRoom + 12;
  // Room at the right for the label of the worst dot, or for the median.
  const right = sheet.width - timeRoom - (narrow ? 48 : 62);
  const pitch = narrow ? 40 : Math.max(22, Math.min(56, 470 / chart.rows.length));
  const values = chart.rows.flatMap((row) => row.dots.flatMap((dot) => (dot[3] ? [dot[1], ...dot[3]] : [dot[1]])));
  const low = chart.unit === 'times' ? Math.min(1, ...values) : Math.max(1, Math.min(...values)) * 0.9;
  // A few far dots would press all others together: they stand at the end of the axis, with an arrow.
  const highest = Math.max(low * 1.3, ...values);
  const marked = 2.2 * Math.max(...chart.rows.map((row) => row.p90 || 0));
  const high = marked > 0 && highest > 1.3 * marked ? Math.max(4.4, marked) : highest;
  const x = (value) => left + (Math.log(Math.min(Math.max(value, low), high) / low) / Math.log(high / low)) * (right - left);
  const top = chart.unit === 'nanoseconds' ? 22 : 8;
  const floor = top + chart.rows.length * pitch + 4;
  const all = (chart.unit === 'times' ? RATIO_TICKS : TIME_TICKS).filter((tick) => tick >= low && tick <= high);
  for (const tick of sparse(all, x, narrow ? 44 : 36)) {
    svg('line', { class: tick === 1 && chart.unit === 'times' ? 'bound' : 'grid', x1: x(tick), x2: x(tick), y1: top, y2: floor }, sheet.root);
    svg('text', { x: x(tick), y: floor + 16, 'text-anchor': 'middle' }, sheet.root).textContent = text(tick);
  }
  svg('line', { class: 'axis', x1: left, x2: right, y1: floor, y2: floor }, sheet.root);
  svg('text', { class: 'strong', x: (left + right) / 2, y: floor + 34, 'text-anchor': 'middle' }, sheet.root).textContent = fitted(chart.axis, sheet.width - 20);
  if (chart.unit === 'nanoseconds') svg('text', { class: 'strong', x: sheet.width - 4, y: 12, 'text-anchor': 'end' }, sheet.root).textContent = 'median';
  chart.rows.forEach((row, place) => stripOn(sheet, chart, data, row, { x, text, narrow, left, right, high, pitch, y: top + (place + 0.5) * pitch + (narrow ? 8 : 0) }));
  if (timeRoom) timeBars(sheet, chart, { left: sheet.width - timeRoom + 12, right: sheet.width - 58, top, pitch, floor });
  return floor + 42;
}

function stripOn(sheet, chart, data, row, { x, text, narrow, left, right, high, pitch, y }) {
  const name = data.strategies[row.strategy];
  const colour = strategyClass(row.strategy);
  const label = row.failed ? `${name} (${count(row.failed)} did not complete)` : name;
  if (narrow) {
    const time = row.time === null || !chart.time_axis ? '' : `, driver ${duration(row.time)}`;
    svg('text', { class: 'strong', x: left, y: y - 12 }, sheet.root).textContent = fitted(`${label}${time}`, sheet.width - 2 * left);
  } else {
    svg('text', { class: 'strong', x: left - 12, y: y + (row.failed ? -1 : 4), 'text-anchor': 'end' }, sheet.root).textContent = fitted(name, left - 14);
    if (row.failed) svg('text', { class: 'alarm', x: left - 12, y: y + 11, 'text-anchor': 'end' }, sheet.root).textContent = `${count(row.failed)} did not complete`;
  }
  const height = Math.min(10, pitch / 2 - 3);
  svg('line', { class: 'grid', x1: left, x2: right, y1: y, y2: y }, sheet.root);
  // Few dots need no scatter and may be larger.
  const few = row.dots.length <= 12;
  for (const [workload, value, note, passes] of row.dots) {
    const [title, pattern] = chart.workloads[workload];
    const [cx, cy] = [x(value), y + (few && !passes ? 0 : scatter(workload) * (height - 3))];
    if (passes) svg('line', { class: `whisk ${colour}`, x1: x(passes[0]), x2: x(passes[1]), y1: cy, y2: cy }, sheet.root);
    const isShared = / threads: /.test(title);
    if (value > high) svg('path', { class: `dot ${colour}`, d: `M${cx + 5} ${cy}l-7 -4v8Z` }, sheet.root);
    else svg('circle', { class: `dot ${colour}${isShared ? ' hollow' : ''}`, cx, cy, r: few ? 4.5 : 3 }, sheet.root);
    const rows = [[chart.unit === 'times' ? 'memory' : 'time', `${text(value)}${chart.unit === 'times' ? ` (${note})` : ''}`]];
    if (passes) rows.push(['fastest to slowest pass', `${text(passes[0])} to ${text(passes[1])}`], ['measured', note]);
    sheet.mark(cx, cy, `${name}, ${title}`, rows, pattern ? pattern.replace('{}', name) : null);
  }
  if (row.interval) svg('path', { class: 'interval', d: `M${x(row.interval[0])} ${y - 3}v6m0 -3H${x(row.interval[1])}m0 -3v6` }, sheet.root);
  if (row.p90 !== null) svg('rect', { class: 'p90', x: x(row.p90) - 3, y: y - height, width: 6, height: 2 * height }, sheet.root);
  if (row.median !== null) svg('line', { class: 'median', x1: x(row.median), x2: x(row.median), y1: y - height, y2: y + height }, sheet.root);
  if (chart.unit === 'nanoseconds') {
    if (row.median !== null) svg('text', { class: 'strong', x: sheet.width - 4, y: y + 4, 'text-anchor': 'end' }, sheet.root).textContent = text(row.median);
    return;
  }
  if (row.dots.length === 0) return;
  const worst = row.dots.reduce((most, dot) => (dot[1] > most[1] ? dot : most));
  const at = x(worst[1]) + 9;
  svg('text', { x: at, y: y + 4 }, sheet.root).textContent = text(worst[1]);
  const after = at + textWidth(text(worst[1])) + 6;
  if (narrow) return;
  const [small, title] = ['11px system-ui, sans-serif', chart.workloads[worst[0]][0]];
  // The name of the workload stands behind its value, or before its dot if there is room.
  const before = Math.max(left, ...row.dots.filter((dot) => dot !== worst).map((dot) => x(dot[1])), ...[row.p90, row.median].filter((mark) => mark !== null).map(x)) + 8;
  if (right - after > 60) svg('text', { class: 'small', x: after, y: y + 4 }, sheet.root).textContent = fitted(title, right - after, small);
  else if (at - 18 - before > 40) svg('text', { class: 'small', x: at - 18, y: y + 4, 'text-anchor': 'end' }, sheet.root).textContent = fitted(title, at - 18 - before, small);
}

/** The time of each row as a bar. */
function timeBars(sheet, chart, { left, right, top, pitch, floor }) {
  const longest = Math.max(0, ...chart.rows.map((row) => row.time || 0));
  if (longest === 0) return;
  const x = (time) => left + (time / longest) * (right - left);
  svg('line', { class: 'axis', x1: left, x2: left, y1: top, y2: floor }, sheet.root);
  svg('text', { class: 'strong', x: left, y: floor + 34 }, sheet.root).textContent = fitted(chart.time_axis, sheet.width - left);
  chart.rows.forEach((row, place) => {
    if (!(row.time > 0)) return;
    const y = top + (place + 0.5) * pitch;
    svg('rect', { class: 'time-bar', x: left, y: y - pitch / 4, width: Math.max(1, x(row.time) - left), height: pitch / 2 }, sheet.root);
    svg('text', { x: x(row.time) + 5, y: y + 4 }, sheet.root).textContent = duration(row.time);
  });
}
