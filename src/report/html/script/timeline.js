// Memory over time: all strategies with live bytes below them, or one strategy by category.

function drawTimeline(host, chart, data) {
  const shown = new Set(chart.cases.map((_, place) => place));
  // By category, the strategy that reserves most is shown first.
  const most = (one) => (one.categories.length ? Math.max(...one.reserved.max) : -1);
  const stacked = chart.cases.reduce((best, one, place) => (most(one) > most(chart.cases[best]) ? place : best), 0);
  const state = { what: 'reserved', over: 'events', stacked };
  const name = (one) => data.strategies[one.strategy];
  const colour = (one) => `c${one.strategy % 8}`;
  const axis = (one) => (state.over === 'time' ? one.time : one.events);
  const visible = () => chart.cases.filter((_, place) => shown.has(place));
  // Device memory use is not known for every case.
  const bandOf = (one) => one[state.what];
  const drawn = () => visible().filter((one) => bandOf(one));
  const isStacked = () => state.what === 'category';
  const ends = (list) => list[list.length - 1] || 1;

  const highestIn = (xs, values, from, to) => {
    let most = 0;
    for (let i = placeOf(xs, from); i < xs.length && xs[i] <= to; i += 1) most = Math.max(most, values[i]);
    return most;
  };

  const options = {
    label: `Memory over time: ${chart.title}`,
    domain: () => [0, Math.max(1, ...chart.cases.map((one) => ends(axis(one))))],
    tick: (x) => (state.over === 'time' ? duration(x) : count(x)),
    highest: (from, to) => {
      const cases = isStacked() ? [chart.cases[state.stacked]] : drawn();
      const series = isStacked() ? 'reserved' : state.what;
      const peaks = cases.map((one) => highestIn(axis(one), one[series].max, from, to));
      if (chart.live && state.over === 'events') peaks.push(highestIn(chart.live.events, chart.live.max, from, to));
      const most = Math.max(1, ...peaks);
      return chart.limit && chart.limit < most * 1.3 ? Math.max(most, chart.limit) : most;
    },
    draw: (plot, layer) => {
      if (state.over === 'events') drawSteps(plot, layer);
      if (isStacked()) drawStack(plot, layer, chart.cases[state.stacked]);
      else drawLines(plot, layer);
      if (chart.limit && chart.limit <= plot.top) plot.level(layer, chart.limit, 'limit', `limit ${bytes(chart.limit)}`);
    },
    read: (x) => ({ title: heading(x), rows: isStacked() ? readStack(x, chart.cases[state.stacked]) : readLines(x) }),
  };

  function heading(x) {
    if (state.over === 'time') return duration(x);
    const steps = chart.steps.map((step) => step[0]);
    const within = steps.length && x >= steps[0] ? `, step ${chart.steps[placeOf(steps, x)][1]}` : '';
    return `event ${count(x)}${within}`;
  }

  function drawSteps(plot, layer) {
    const [from, to] = plot.view;
    const inside = chart.steps.filter(([event]) => event >= from && event <= to);
    if (inside.length > 60) return;
    const every = Math.ceil(inside.length / (plot.width / 70));
    inside.forEach(([event, step], place) => {
      const x = plot.x(event);
      svg('line', { class: 'step', x1: x, x2: x, y1: MARGIN.top, y2: plot.height - MARGIN.bottom }, layer);
      if (place % every === 0) svg('text', { x: x + 3, y: 11 }, layer).textContent = place === 0 ? `step ${step}` : step;
    });
  }

  function drawLines(plot, layer) {
    if (chart.live && state.over === 'events') plot.area(layer, chart.live.events, chart.live.max, { class: 'live-area' });
    if (chart.bound && chart.bound <= plot.top) {
      const y = plot.y(chart.bound);
      svg('line', { class: 'bound', x1: MARGIN.left, x2: plot.width - MARGIN.right, y1: y, y2: y }, layer);
    }
    for (const one of drawn()) plot.line(layer, axis(one), bandOf(one), colour(one), dashOf(one.strategy));
    let labels = 0;
    for (const one of drawn()) {
      drawIncidents(plot, layer, one, labels);
      labels += one.incidents.some(([, , kind]) => kind === 'oom') ? 1 : 0;
    }
  }

  function drawIncidents(plot, layer, one, labels) {
    const first = one.incidents.find(([, , kind]) => kind === 'oom');
    for (const [event, time, kind] of one.incidents) {
      const x = plot.x(state.over === 'time' ? time : event);
      if (kind === 'retry') {
        const y = plot.height - MARGIN.bottom;
        svg('path', { class: `retry-mark ${colour(one)}`, d: `M${x - 4} ${y}L${x} ${y - 8}L${x + 4} ${y}Z` }, layer);
        continue;
      }
      const xs = axis(one);
      const y = plot.y(bandOf(one).max[placeOf(xs, state.over === 'time' ? time : event)]);
      svg('path', { class: 'oom-mark', d: `M${x - 6} ${y - 6}L${x + 6} ${y + 6}M${x - 6} ${y + 6}L${x + 6} ${y - 6}` }, layer);
      // Labels are stacked on top of the lines.
      if (first[0] === event) {
        const anchor = x > plot.width * 0.6 ? 'end' : 'start';
        svg('text', { class: 'label', x: x + (anchor === 'end' ? -12 : 12), y: plot.y(plot.top) + 40 + 17 * labels, 'text-anchor': anchor }, layer).textContent = `${name(one)} ran out`;
      }
    }
  }

  function drawStack(plot, layer, one) {
    const points = one.categories;
    if (!points.length) return;
    const xs = points.map((point) => point[0]);
    let floor = xs.map(() => 0);
    data.categories.forEach((_, place) => {
      const roof = points.map((point, i) => floor[i] + point[place + 1]);
      if (points.some((point) => point[place + 1] > 0)) {
        plot.area(layer, xs, roof, { class: `c${place}`, fill: 'currentColor', 'fill-opacity': 0.8 }, floor);
      }
      floor = roof;
    });
    plot.line(layer, one.events, { max: one.reserved.max }, '', '', 'bound');
  }

  function between(band, place) {
    const [low, high] = [band.min ? band.min[place] : band.max[place], band.max[place]];
    return bytes(low) === bytes(high) ? bytes(high) : `${bytes(low)} to ${bytes(high)}`;
  }

  function readLines(x) {
    const rows = visible().map((one) => {
      const xs = axis(one);
      if (hasEnded(one, x)) return [colour(one), name(one), 'ended'];
      if (!bandOf(one)) return [colour(one), name(one), 'unknown'];
      const place = placeOf(xs, x);
      return [colour(one), name(one), between(bandOf(one), place), bandOf(one).max[place]];
    });
    if (chart.live && state.over === 'events') {
      const place = placeOf(chart.live.events, x);
      rows.push(['live-key', 'live', between(chart.live, place), chart.live.max[place]]);
    }
    return rows;
  }

  const hasEnded = (one, x) => x > ends(axis(one)) && one.incidents.some(([, , kind]) => kind === 'oom');

  function readStack(x, one) {
    if (hasEnded(one, x)) return [[colour(one), name(one), 'ended']];
    const point = one.categories[placeOf(one.categories.map((each) => each[0]), x)] || [];
    const rows = data.categories.map((category, place) => [`c${place}`, category, bytes(point[place + 1] || 0), undefined, point[place + 1]]);
    const filled = rows.filter((row) => row[4] > 0).map((row) => row.slice(0, 3));
    return [['', 'reserved', bytes(one.reserved.max[placeOf(one.events, x)])], ...filled.reverse()];
  }

  const controls = html('div', { class: 'controls' });
  const keys = html('div', { class: 'keys' });
  const picker = html('select', { 'aria-label': 'Strategy to show by category' });
  chart.cases.forEach((one, place) => {
    if (one.categories.length) picker.append(html('option', { value: place }, name(one)));
  });
  picker.value = state.stacked;
  picker.hidden = true;
  const choices = [['reserved', 'reserved'], ['allocated', 'allocated']];
  if (chart.cases.some((one) => one.device)) choices.push(['device', 'device used']);
  if (chart.cases.some((one) => one.categories.length)) choices.push(['category', 'by category']);
  controls.append(
    segmented('Show', choices, state.what, (what) => {
      state.what = what;
      if (isStacked()) overButtons.querySelector('[data-choice="events"]').click();
      overButtons.querySelector('[data-choice="time"]').disabled = isStacked();
      picker.hidden = !isStacked();
      refresh();
    }),
    picker,
  );
  const overButtons = segmented('over', [['events', 'events'], ['time', 'time']], state.over, (over) => {
    state.over = over;
    plot.show(options.domain());
  });
  controls.append(overButtons);
  picker.addEventListener('change', () => {
    state.stacked = Number(picker.value);
    refresh();
  });
  host.append(controls);
  const plot = new Plot(host, options);
  controls.append(plot.reset);
  host.append(keys);

  function refresh() {
    plot.draw();
    keys.replaceChildren();
    if (isStacked()) {
      data.categories.forEach((category, place) => {
        const present = chart.cases[state.stacked].categories.some((point) => point[place + 1] > 0);
        if (present) keys.append(html('span', { class: 'key' }, html('span', { class: `swatch c${place}` }), category));
      });
      keys.append(key((sample) => svg('line', { class: 'bound', x1: 0, x2: 26, y1: 5, y2: 5 }, sample), 'reserved'));
      return;
    }
    chart.cases.forEach((one, place) => {
      const button = html('button', { type: 'button', 'aria-pressed': String(shown.has(place)) }, lineSample(one.strategy), name(one));
      button.addEventListener('click', () => {
        if (!shown.delete(place)) shown.add(place);
        button.setAttribute('aria-pressed', String(shown.has(place)));
        plot.draw();
      });
      keys.append(button);
    });
    keys.append(key((sample) => svg('rect', { class: 'live-area', x: 0, y: 0, width: 26, height: 10 }, sample), 'live'));
    if (chart.bound) keys.append(key((sample) => svg('line', { class: 'bound', x1: 0, x2: 26, y1: 5, y2: 5 }, sample), `bound ${bytes(chart.bound)}`));
    const kinds = new Set(chart.cases.flatMap((one) => one.incidents.map(([, , kind]) => kind)));
    if (kinds.has('oom')) keys.append(key((sample) => svg('path', { class: 'oom-mark', d: 'M9 1L17 9M9 9L17 1' }, sample), 'out of memory'));
    if (kinds.has('retry')) keys.append(key((sample) => svg('path', { class: 'retry-mark c6', d: 'M9 9L13 1L17 9Z' }, sample), 'cache given back, retried'));
  }
  refresh();
}

