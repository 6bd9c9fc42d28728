// What steps keep, with the fitted line up to the limit.

/** A line that reaches the limit after more than this many times the steps of the run is not followed to it. */
const FAR = 8;

function drawGrowth(host, chart, data) {
  const lines = [['kept', chart.kept, 'c0', '', 'kept: lowest in a step'], ['reserved', chart.reserved, 'c6', '7 3', chart.reserved_at_end ? 'reserved: at the end of a step' : 'reserved: highest in a step']];
  const shown = new Set(['kept', 'reserved', 'fit']);
  const last = chart.steps[chart.steps.length - 1] || 1;
  const [first, start, slope] = chart.fit;
  const fitted = (step) => start + slope * (step - first);
  const isNear = chart.reach && chart.reach <= last * FAR;
  const furthest = isNear ? chart.reach * 1.05 : last;
  const plot = new Plot(host, {
    label: `What steps keep: ${chart.title}`,
    domain: () => [chart.steps[0], furthest],
    tick: (step) => count(step),
    titles: () => ['step', `memory under ${data.strategies[chart.strategy]}`],
    zoom: 'zoom-steps',
    link: { name: chart.title, moment: (x) => ({ step: stepAt(x) }), place: ({ step }) => step },
    highest: () => Math.max(1, shown.has('fit') ? fitted(furthest) : 0, isNear ? chart.limit : 0, ...lines.flatMap(([name, values]) => (shown.has(name) ? values : []))),
    draw: (plot, layer) => {
      for (const [name, values, colour, dash] of lines) {
        if (!shown.has(name)) continue;
        plot.line(layer, chart.steps, { max: values }, colour, dash);
        if (name !== 'kept' || values.length > 150) continue;
        values.forEach((level, place) => svg('circle', { class: `point ${colour}`, cx: plot.x(chart.steps[place]), cy: plot.y(level), r: 3 }, layer));
      }
      if (chart.limit && chart.limit <= plot.top) plot.level(layer, chart.limit, 'limit', `limit ${bytes(chart.limit)}`, 'start');
      if (shown.has('fit')) drawFit(plot, layer);
    },
    read: (x) => {
      const step = stepAt(x);
      if (x > last + 0.5) return { title: `step ${count(x)}, not run`, rows: [['c1', 'fitted line', bytes(fitted(x)), fitted(x)]] };
      const place = placeOf(chart.steps, step);
      const rows = lines.filter(([name]) => shown.has(name)).map(([name, values, colour]) => [colour, name, bytes(values[place]), values[place]]);
      return { title: `step ${step}`, rows };
    },
  });

  function stepAt(x) {
    return chart.steps[placeOf(chart.steps, x + 0.5)];
  }

  function drawFit(plot, layer) {
    svg('line', { class: 'fit', x1: plot.x(first), y1: plot.y(start), x2: plot.x(furthest), y2: plot.y(fitted(furthest)) }, layer);
    if (!isNear) return;
    const [x, y] = [plot.x(chart.reach), plot.y(chart.limit)];
    svg('circle', { class: 'point c1', cx: x, cy: y, r: 5 }, layer);
    svg('text', { class: 'label', x: x - 10, y: y - 8, 'text-anchor': 'end' }, layer).textContent = `the line reaches the limit in step ${count(chart.reach)}`;
  }

  const keys = html('div', { class: 'keys' });
  const sample = (draw) => {
    const picture = svg('svg', { viewBox: '0 0 26 10', class: 'plot', 'aria-hidden': 'true' });
    draw(picture);
    return picture;
  };
  const samples = lines.map(([name, , colour, dash, text]) => [name, text, sample((picture) => svg('line', { class: `line ${colour}`, x1: 0, x2: 26, y1: 5, y2: 5, 'stroke-dasharray': dash }, picture))]);
  samples.push(['fit', `fitted: ${bytes(slope)} per step`, sample((picture) => svg('line', { class: 'fit', x1: 0, x2: 26, y1: 5, y2: 5 }, picture))]);
  for (const [name, text, picture] of samples) {
    const button = html('button', { type: 'button', 'aria-pressed': 'true' }, picture, text);
    button.addEventListener('click', () => {
      if (!shown.delete(name)) shown.add(name);
      button.setAttribute('aria-pressed', String(shown.has(name)));
      plot.draw();
    });
    keys.append(button);
  }
  host.append(keys, html('div', { class: 'controls' }, plot.reset));
}

