// Memory over time: all strategies with live bytes below them, or one strategy by category.

/** The colours of categories, in their order: those of the memory map, where no other mark needs them; grey is not known. */
const CATEGORY_TINTS = ['c0', 'c8', 'c2', 'c3', 'c4', 'c7', 'c6', 'c9', 'c5', 'c1'];

function drawTimeline(host, chart, data) {
  const hidden = (pageState.get('hide') || '').split('|');
  const shown = new Set(chart.cases.map((_, place) => place).filter((place) => !hidden.includes(data.strategies[chart.cases[place].strategy])));
  // By category, the strategy that reserves most is shown first.
  const most = (one) => (one.categories.length ? Math.max(...one.reserved.max) : -1);
  const stacked = chart.cases.reduce((best, one, place) => (most(one) > most(chart.cases[best]) ? place : best), 0);
  const known = ['reserved', 'allocated', 'device', 'category'];
  const state = {
    what: known.find((what) => what === pageState.get('show') && (what !== 'device' || chart.cases.some((one) => one.device)) && (what !== 'category' || chart.cases[stacked].categories.length)) || 'reserved',
    over: pageState.get('over') === 'time' && pageState.get('show') !== 'category' ? 'time' : 'events',
    stacked,
  };
  const name = (one) => data.strategies[one.strategy];
  const colour = (one) => strategyClass(one.strategy);
  const axis = (one) => (state.over === 'time' ? one.time : one.events);
  const visible = () => chart.cases.filter((_, place) => shown.has(place));
  // Device memory use is not known for every case.
  const bandOf = (one) => one[state.what];
  const drawn = () => visible().filter((one) => bandOf(one));
  const isStacked = () => state.what === 'category';
  const ends = (list) => list[list.length - 1] || 1;
  const failed = (one) => one.incidents.find(([, , kind]) => kind === 'oom');
  // What takes a fixed part of the device would make all other lines flat.
  const scaled = (cases) => {
    const free = cases.filter((one) => !data.fixed[one.strategy]);
    return free.length ? free : cases;
  };
  const WHAT = { reserved: 'reserved memory', allocated: 'allocated memory', device: 'memory used on the device', category: 'allocated memory by category' };

  const highestIn = (xs, values, from, to) => {
    let most = 0;
    for (let i = placeOf(xs, from); i < xs.length && xs[i] <= to; i += 1) most = Math.max(most, values[i]);
    return most;
  };

  const options = {
    label: `Memory over time: ${chart.title}`,
    domain: () => [0, Math.max(1, ...chart.cases.map((one) => ends(axis(one))))],
    tick: (x) => (state.over === 'time' ? duration(x) : count(x)),
    titles: () => [state.over === 'time' ? 'time on the device' : 'events of the program', isStacked() ? `${WHAT.category}, ${name(chart.cases[state.stacked])}` : WHAT[state.what]],
    zoom: 'zoom',
    ends: () => (isStacked() ? [] : drawn().filter((one) => !failed(one)).map(endOf)),
    link: {
      name: chart.title,
      moment: (x) => (state.over === 'time' ? null : { event: x, step: stepAt(x) }),
      place: ({ event, step }) => (state.over === 'time' ? undefined : event ?? chart.steps.find((one) => one[1] === step)?.[0]),
    },
    highest: (from, to) => {
      const cases = isStacked() ? [chart.cases[state.stacked]] : scaled(drawn());
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
      if (chart.limit && chart.limit <= plot.top) {
        // The label stands on the side where no failure is named.
        const isLate = drawn().some((one) => failed(one) && whereFailed(plot, one) > (MARGIN.left + plot.right) / 2);
        plot.level(layer, chart.limit, 'limit', `limit ${bytes(chart.limit)}`, isLate ? 'start' : 'end');
      }
    },
    read: (x) => ({ title: heading(x), rows: isStacked() ? readStack(x, chart.cases[state.stacked]) : readLines(x) }),
  };

  /** The name at the end of a line; above the scale with its level. */
  function endOf(one) {
    const [level, text] = [bandOf(one).max.at(-1), shortName(one.strategy)];
    return { strategy: one.strategy, x: ends(axis(one)), level, text: data.fixed[one.strategy] ? `${text} ↑ ${bytes(level)}` : text };
  }

  function stepAt(x) {
    const steps = chart.steps.map((step) => step[0]);
    return steps.length && x >= steps[0] ? chart.steps[placeOf(steps, x)][1] : undefined;
  }

  function heading(x) {
    if (state.over === 'time') return duration(x);
    const step = stepAt(x);
    return `event ${count(x)}${step === undefined ? '' : `, step ${step}`}`;
  }

  function drawSteps(plot, layer) {
    const [from, to] = plot.view;
    const inside = chart.steps.filter(([event]) => event >= from && event <= to);
    if (inside.length > 60) return;
    const every = Math.ceil(inside.length / (plot.width / 70));
    inside.forEach(([event, step], place) => {
      const x = plot.x(event);
      svg('line', { class: 'step', x1: x, x2: x, y1: MARGIN.top, y2: plot.height - MARGIN.bottom }, layer);
      if (place % every === 0) svg('text', { x: x + 3, y: MARGIN.top - 5 }, plot.root).textContent = place === 0 ? `step ${step}` : step;
    });
  }

  function drawLines(plot, layer) {
    if (chart.live && state.over === 'events') plot.area(layer, chart.live.events, chart.live.max, { class: 'live-area' });
    if (chart.bound && chart.bound <= plot.top) {
      const y = plot.y(chart.bound);
      svg('line', { class: 'bound', x1: MARGIN.left, x2: plot.right, y1: y, y2: y }, layer);
    }
    const lines = drawn();
    for (const one of lines) plot.line(layer, axis(one), bandOf(one), colour(one), dashOf(one.strategy));
    lines.forEach((one, turn) => plot.markers(layer, axis(one), bandOf(one).max, one.strategy, turn, lines.length));
    lines.forEach((one) => drawIncidents(plot, layer, one));
    nameFailures(plot, layer, lines.filter(failed));
  }

  const whereFailed = (plot, one) => plot.x(failed(one)[state.over === 'time' ? 1 : 0]);

  /** One label for failures at about the same place. Labels are stacked from the top. */
  function nameFailures(plot, layer, lines) {
    const groups = [];
    for (const one of [...lines].sort((a, b) => whereFailed(plot, a) - whereFailed(plot, b))) {
      const last = groups.at(-1);
      if (last && whereFailed(plot, one) - whereFailed(plot, last[0]) < 40) last.push(one);
      else groups.push([one]);
    }
    groups.forEach((group, place) => {
      const x = whereFailed(plot, group[0]);
      const named = group.slice(0, 3).map((one) => shortName(one.strategy));
      const text = `${named.join(', ')}${group.length > 3 ? ` and ${group.length - 3} more` : ''} ran out`;
      const anchor = x > (MARGIN.left + plot.right) / 2 ? 'end' : 'start';
      svg('text', { class: 'label', x: x + (anchor === 'end' ? -12 : 12), y: MARGIN.top + 18 + 17 * place, 'text-anchor': anchor }, layer).textContent = text;
    });
  }

  function drawIncidents(plot, layer, one) {
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
        plot.area(layer, xs, roof, { class: CATEGORY_TINTS[place], fill: 'currentColor', 'fill-opacity': 0.8 }, floor);
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
      if (hasEnded(one, x)) return [swatchClass(one.strategy), name(one), 'ended'];
      if (!bandOf(one)) return [swatchClass(one.strategy), name(one), 'unknown'];
      const place = placeOf(xs, x);
      return [swatchClass(one.strategy), name(one), between(bandOf(one), place), bandOf(one).max[place]];
    });
    // In the order of the lines.
    rows.sort((a, b) => (b[3] ?? -1) - (a[3] ?? -1));
    if (chart.live && state.over === 'events') {
      const place = placeOf(chart.live.events, x);
      rows.push(['live-key', 'live', between(chart.live, place), chart.live.max[place]]);
    }
    return rows;
  }

  const hasEnded = (one, x) => x > ends(axis(one)) && failed(one);

  function readStack(x, one) {
    if (hasEnded(one, x)) return [[colour(one), name(one), 'ended']];
    const point = one.categories[placeOf(one.categories.map((each) => each[0]), x)] || [];
    const rows = data.categories.map((category, place) => [CATEGORY_TINTS[place], category, bytes(point[place + 1] || 0), undefined, point[place + 1]]);
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
  picker.hidden = !isStacked();
  const choices = [['reserved', 'reserved'], ['allocated', 'allocated']];
  if (chart.cases.some((one) => one.device)) choices.push(['device', 'device used']);
  if (chart.cases.some((one) => one.categories.length)) choices.push(['category', 'by category']);
  controls.append(
    segmented('Show', choices, state.what, (what) => {
      state.what = what;
      pageState.set('show', what === 'reserved' ? null : what);
      if (isStacked()) overButtons.querySelector('[data-choice="events"]').click();
      overButtons.querySelector('[data-choice="time"]').disabled = isStacked();
      picker.hidden = !isStacked();
      refresh();
    }),
    picker,
  );
  const overButtons = segmented('over', [['events', 'events'], ['time', 'time']], state.over, (over) => {
    state.over = over;
    pageState.set('over', over === 'events' ? null : over);
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
        if (present) keys.append(html('span', { class: 'key' }, html('span', { class: `swatch ${CATEGORY_TINTS[place]}` }), category));
      });
      keys.append(key((sample) => svg('line', { class: 'bound', x1: 0, x2: 26, y1: 5, y2: 5 }, sample), 'reserved'));
      return;
    }
    chart.cases.forEach((one, place) => {
      const fixed = data.fixed[one.strategy] ? ` (fixed part of the device: ${bytes(Math.max(...one.reserved.max))})` : '';
      const button = html('button', { type: 'button', 'aria-pressed': String(shown.has(place)) }, lineSample(one.strategy), name(one) + fixed);
      button.addEventListener('click', () => {
        if (!shown.delete(place)) shown.add(place);
        button.setAttribute('aria-pressed', String(shown.has(place)));
        const off = chart.cases.filter((_, other) => !shown.has(other)).map(name);
        pageState.set('hide', off.length ? off.join('|') : null);
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

