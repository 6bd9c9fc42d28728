// What steps keep, with the fitted line.

function drawGrowth(host, chart, data) {
  const lines = [['kept', chart.kept, 'c0'], ['reserved', chart.reserved, 'c6']];
  const shown = new Set(['kept', 'reserved', 'fit']);
  const last = chart.steps[chart.steps.length - 1] || 1;
  const [first, start, slope] = chart.fit;
  const fitted = (step) => start + slope * (step - first);
  const plot = new Plot(host, {
    label: `What steps keep: ${chart.title}`,
    domain: () => [chart.steps[0], last],
    tick: (step) => count(step),
    highest: () => Math.max(1, shown.has('fit') ? fitted(last) : 0, ...lines.flatMap(([name, values]) => (shown.has(name) ? values : []))),
    draw: (plot, layer) => {
      for (const [name, values, colour] of lines) {
        if (!shown.has(name)) continue;
        plot.line(layer, chart.steps, { max: values }, colour, '');
        if (name !== 'kept' || values.length > 150) continue;
        values.forEach((level, place) => svg('circle', { class: `point ${colour}`, cx: plot.x(chart.steps[place]), cy: plot.y(level), r: 3 }, layer));
      }
      if (shown.has('fit')) {
        svg('line', { class: 'fit', x1: plot.x(first), y1: plot.y(start), x2: plot.x(last), y2: plot.y(fitted(last)) }, layer);
      }
      if (chart.limit && chart.limit <= plot.top) plot.level(layer, chart.limit, 'limit', `limit ${bytes(chart.limit)}`);
    },
    read: (x) => {
      const place = placeOf(chart.steps, x + 0.5);
      const rows = lines.filter(([name]) => shown.has(name)).map(([name, values, colour]) => [colour, name, bytes(values[place]), values[place]]);
      return { title: `step ${chart.steps[place]}, ${data.strategies[chart.strategy]}`, rows };
    },
  });
  const keys = html('div', { class: 'keys' });
  const samples = [
    ['kept', 'kept: lowest in a step', lineSample(0)],
    ['reserved', 'reserved: highest in a step', lineSample(6)],
    ['fit', `fitted: ${bytes(slope)} per step`, (() => {
      const sample = svg('svg', { viewBox: '0 0 26 10', class: 'plot', 'aria-hidden': 'true' });
      svg('line', { class: 'fit', x1: 0, x2: 26, y1: 5, y2: 5 }, sample);
      return sample;
    })()],
  ];
  for (const [name, text, sample] of samples) {
    const button = html('button', { type: 'button', 'aria-pressed': 'true' }, sample, text);
    button.addEventListener('click', () => {
      if (!shown.delete(name)) shown.add(name);
      button.setAttribute('aria-pressed', String(shown.has(name)));
      plot.draw();
    });
    keys.append(button);
  }
  host.append(keys, plot.reset);
}

