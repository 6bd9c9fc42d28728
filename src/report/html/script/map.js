// The memory map: all reserved memory in address order, in rows like lines of text. Amounts are in bytes.

const STATES = ['in use', 'waiting for a stream', 'lent', 'free'];
const STATE_TINTS = ['block', 'c4', 'c3', 'hole'];
const OCCASIONS = { regular: 'on the way', peak: 'peak', out_of_memory: 'out of memory', end: 'end' };
const FREE = 3;
const AGES = 5;
// The colours of categories, streams and call sites. Orange is left for holes.
const TINTS = ['c0', 'c8', 'c2', 'c3', 'c4', 'c7', 'c6', 'block', 'c5', 'live'];
const UNKNOWN_CATEGORY = 7;
const SITE_TINTS = ['c0', 'c2', 'c3', 'c4', 'c8', 'c7', 'c5'];

const ofBytes = (amount) => bytes(amount / 1024);
const plural = (number, one, many) => `${count(number)} ${number === 1 ? one : many}`;

/** The smallest round amount (a power of two, or one and a half of it) that is at least `amount`. */
function roundAmount(amount) {
  const power = 2 ** Math.floor(Math.log2(Math.max(1, amount)));
  return [1, 1.5, 2].map((factor) => factor * power).find((size) => size >= amount);
}

/** The blocks of a frame, each with its segment. */
function blocksOfFrame(frame) {
  const found = [];
  for (const segment of frame.segments) {
    const joined = new Map();
    for (let i = 0; i < segment[4].length; i += 4) joined.set(segment[4][i], segment[4].slice(i + 1, i + 4));
    const length = segment[3].length / 5;
    // One number of all blocks after the other, each as the difference from the block before.
    const sums = [0, 0, 0, 0, 0];
    for (let i = 0; i < length; i += 1) {
      for (let column = 0; column < 5; column += 1) sums[column] += segment[3][column * length + i];
      const [size, status, category, born, site] = sums;
      const [blocks, holes, free] = joined.get(i) || [1, 0, 0];
      found.push({ size, status, category, born, site, blocks, holes, free, segment, first: i === 0 });
    }
  }
  return found;
}

/** The call sites with the most bytes in these frames, by place, with their colours. */
function siteTints(map) {
  const weights = new Map();
  for (const frame of map.frames) {
    for (const block of blocksOfFrame(frame)) {
      if (block.site >= 0) weights.set(block.site, (weights.get(block.site) || 0) + block.size);
    }
  }
  const sites = [...weights].sort((one, other) => other[1] - one[1]).slice(0, SITE_TINTS.length);
  return new Map(sites.map(([site], place) => [site, SITE_TINTS[place]]));
}

/** One map: a heading, its sums and its picture. */
class MapPanel {
  constructor(chart, data) {
    this.chart = chart;
    this.data = data;
    this.title = html('h4', {});
    this.facts = html('p', { class: 'facts', 'aria-live': 'polite' });
    this.picture = svg('svg', { class: 'map', role: 'img', tabindex: -1 });
    this.root = html('div', { class: 'panel' }, this.title, this.facts, this.picture);
    this.picture.addEventListener('pointermove', (event) => this.chart.point(event, this));
    this.picture.addEventListener('pointerleave', () => { this.chart.readout.hidden = true; });
  }

  open(map) {
    this.map = map;
    this.sites = siteTints(map);
  }

  /** The frame at a moment: the same event, or the last one before it. */
  choose(moment) {
    const { frames } = this.map;
    const same = frames.filter((frame) => frame.event === moment.event);
    this.frame = same.find((frame) => frame.occasion === moment.occasion) || same[0] ||
      frames.filter((frame) => frame.event <= moment.event).pop() || frames[0];
    this.blocks = blocksOfFrame(this.frame);
    this.isSame = this.frame.event === moment.event;
  }

  tell(alone, scale) {
    const { frame } = this;
    const { sums } = frame;
    const name = this.data.strategies[this.map.strategy];
    this.title.hidden = alone;
    this.title.replaceChildren(html('span', { class: `swatch ${strategyClass(this.map.strategy)}` }), name);
    const parts = [html('b', {}, `${OCCASIONS[frame.occasion]}, event ${count(frame.event)}`)];
    if (!this.isSame) {
      const ended = frame === this.map.frames[this.map.frames.length - 1];
      parts.push(html('em', {}, ended ? ' (it ended there)' : ' (its last picture before that event)'));
    }
    parts.push(`: ${ofBytes(sums.allocated)} allocated`);
    if (sums.pending) parts.push(`, ${ofBytes(sums.pending)} waiting for a stream`);
    if (sums.holes) {
      parts.push(', ', html('b', { class: 'in-holes' }, `${ofBytes(sums.free)} free in ${plural(sums.holes, 'hole', 'holes')}`), `, the largest ${ofBytes(sums.largest_hole)}`);
      const usable = frame.occasion === 'out_of_memory' ? this.map.failed?.largest_free ?? sums.largest_hole : sums.largest_hole;
      if (usable !== sums.largest_hole) parts.push(` (of those that serve such a request: ${ofBytes(usable)})`);
      if (sums.whole_segments) parts.push(` (${plural(sums.whole_segments, 'hole is a whole segment', 'holes are whole segments')})`);
    } else {
      parts.push(', no holes');
    }
    parts.push(`; ${plural(sums.segments, 'segment', 'segments')}. 1 row = ${ofBytes(scale.perRow).replace(/\.0+ /, ' ')}`);
    this.facts.replaceChildren(...parts);
    this.picture.setAttribute('aria-label', `Memory of ${name} on ${this.map.title}: ${this.facts.textContent}`);
  }

  // New blocks are pale and old ones dark, on a logarithmic scale of events.
  ageOf(block) {
    if (block.born < 0) return 0;
    const share = Math.log2(1 + Math.max(0, this.frame.event - block.born)) / Math.log2(2 + this.frame.event);
    return Math.min(AGES - 1, Math.floor(share * AGES));
  }

  paint(block, by) {
    if (block.status === FREE) return { class: 'hole' };
    const tint = {
      state: () => STATE_TINTS[block.status],
      category: () => TINTS[block.category],
      stream: () => TINTS[block.segment[1] % UNKNOWN_CATEGORY],
      site: () => this.sites.get(block.site) || 'block',
      age: () => 'c0',
    }[by]();
    if (tint === 'block') return { class: 'used' };
    return { class: 'used', style: `fill: var(--${tint}); fill-opacity: ${by === 'age' ? ageOpacity(this.ageOf(block)) : 0.5}` };
  }

  draw(width, scale, by) {
    const { rows, height, gap, perRow } = scale;
    const pitch = height + gap;
    this.picture.replaceChildren();
    const [used, free, ticks] = [0, 1, 2].map(() => svg('g', {}, this.picture));
    const pixels = width / perRow;
    let at = 0;
    for (const block of this.blocks) {
      if (block.first) {
        const row = Math.floor(at / perRow + 1e-9);
        const x = ((at - row * perRow) * pixels).toFixed(1);
        svg('line', { class: 'tick', x1: x, x2: x, y1: row * pitch + gap - 2, y2: row * pitch + gap + height + 2 }, ticks);
      }
      let left = block.size;
      while (left > perRow * 1e-9) {
        const row = Math.floor(at / perRow + 1e-9);
        const piece = Math.min(left, (row + 1) * perRow - at);
        const [x, y] = [(at - row * perRow) * pixels, row * pitch + gap];
        const isHole = block.status === FREE;
        // A block ends with a hairline; a hole is at least a pixel wide.
        const wide = isHole ? Math.max(1, piece * pixels) : Math.max(0.2, piece * pixels - (piece * pixels > 2 ? 0.6 : 0));
        const paint = this.paint(block, by);
        svg('rect', { ...paint, x: x.toFixed(2), y, width: wide.toFixed(2), height }, isHole ? free : used).block = block;
        if (!isHole && block.free) {
          const part = Math.max(1, (height * block.free) / block.size);
          svg('rect', { class: 'hole', x: x.toFixed(2), y: (y + height - part).toFixed(2), width: wide.toFixed(2), height: part.toFixed(2) }, free).block = block;
        }
        left -= piece;
        at += piece;
      }
    }
    const below = rows * pitch + gap;
    const total = this.frame.occasion === 'out_of_memory' && this.map.failed ? this.drawFailure(below, width, scale) : below;
    this.picture.setAttribute('viewBox', `0 0 ${width} ${total}`);
    this.picture.style.height = `${total}px`;
  }

  /** The request that failed, the largest hole and what is left on the device, to the scale of the map. */
  drawFailure(top, width, { height, gap, perRow }) {
    const { failed } = this.map;
    const largest = failed.largest_free ?? this.frame.sums.largest_hole;
    const missing = failed.asked - failed.device_free;
    const left = missing > 0 ? `; ${ofBytes(missing)} are missing` : '';
    const asked = ofBytes(failed.asked) !== ofBytes(failed.requested) ? ` (${ofBytes(failed.asked)} of the device)` : '';
    const layer = svg('g', { class: 'failure' }, this.picture);
    let y = top + 22;
    svg('text', { x: 0, y: y - 6, class: 'note' }, layer).textContent = 'To the same scale:';
    const bar = (amount, name, text) => {
      svg('text', { x: 0, y: y + 11, class: name }, layer).textContent = text;
      y += 16;
      for (let from = 0; from < Math.max(amount, 1); from += perRow) {
        const wide = Math.max(1, (Math.min(perRow, amount - from) / perRow) * width - 1);
        svg('rect', { class: `bar ${name}`, x: 0.5, y, width: wide.toFixed(1), height }, layer);
        y += height + gap;
      }
      y += 6;
    };
    bar(failed.requested, 'asked', `requested in one piece: ${ofBytes(failed.requested)}${asked}${failed.requested > perRow ? ', drawn over several rows' : ''}`);
    bar(largest, 'largest', `largest hole that could serve it: ${ofBytes(largest)}${largest ? `, ${Number(((100 * largest) / failed.requested).toPrecision(2))} % of the request` : ''}`);
    bar(failed.device_free, 'left', `${failed.limited ? 'not reserved, up to the limit' : 'not reserved, free on the device'}: ${ofBytes(failed.device_free)}${left}`);
    return y;
  }
}

const ageOpacity = (age) => 0.12 + (0.7 * age) / (AGES - 1);

function drawMap(host, maps, data) {
  const readout = html('div', { class: 'readout', role: 'status', 'aria-live': 'polite', hidden: '' });
  const keys = html('div', { class: 'keys' });
  const slider = html('input', { type: 'range', min: 0, step: 1, 'aria-label': 'Moment' });
  const previous = html('button', { type: 'button', 'aria-label': 'Earlier moment' }, '←');
  const next = html('button', { type: 'button', 'aria-label': 'Later moment' }, '→');
  const picker = html('select', { 'aria-label': 'Case' });
  const beside = html('select', { 'aria-label': 'Beside it' });
  const colours = html('select', { 'aria-label': 'Colour by' });
  const panels = html('div', { class: 'panels' });
  const chart = { readout, point };
  const pair = [new MapPanel(chart, data), new MapPanel(chart, data)];
  pair[0].picture.setAttribute('tabindex', 0);
  panels.append(pair[0].root);
  maps.forEach((map, place) => picker.append(html('option', { value: place }, `${map.title} · ${data.strategies[map.strategy]}`)));
  let moments = [];
  let chosen = 0;
  const shown = () => (beside.value === '' ? [pair[0]] : pair);

  function draw() {
    const width = Math.max(260, panels.firstElementChild.clientWidth);
    const narrow = width < 500;
    const most = Math.max(1, ...shown().flatMap((panel) => panel.map.frames.map(reserved)));
    const perRow = roundAmount(most / (narrow ? 30 : 22));
    const scale = { perRow, rows: Math.ceil(most / perRow), height: narrow ? 10 : 16, gap: 5 };
    for (const panel of shown()) {
      panel.tell(shown().length === 1, scale);
      panel.draw(width, scale, colours.value);
    }
  }
  const reserved = ({ sums }) => sums.allocated + sums.pending + sums.lent + sums.free;

  function choose(place) {
    chosen = Math.min(Math.max(0, place), moments.length - 1);
    const moment = moments[chosen];
    for (const panel of shown()) panel.choose(moment);
    previous.disabled = chosen === 0;
    next.disabled = chosen === moments.length - 1;
    slider.max = moments.length - 1;
    slider.value = chosen;
    slider.setAttribute('aria-valuetext', `${OCCASIONS[moment.occasion]}, event ${moment.event}`);
    legend();
    draw();
    headline();
  }

  /** The headline of the section belongs to what is shown. */
  function headline() {
    const heading = host.closest('section')?.querySelector('h2');
    if (!heading) return;
    const { map, frame } = pair[0];
    const failed = frame.occasion === 'out_of_memory' && map.failed;
    const name = html('code', {}, data.strategies[map.strategy]);
    const free = frame.sums.holes ? `${ofBytes(frame.sums.free)} were free in ${plural(frame.sums.holes, 'hole', 'holes')}, the largest ${ofBytes(frame.sums.largest_hole)}` : 'nothing was free in its cache';
    heading.replaceChildren(...(failed
      ? ['When ', name, ` on ${map.title} failed to allocate ${ofBytes(failed.requested)}, ${free}`]
      : [`${frame.occasion === 'peak' ? 'At the peak of ' : `At event ${count(frame.event)} of `}`, name, ` on ${map.title}, ${free}`]));
  }

  function legend() {
    keys.replaceChildren();
    const add = (tint, text, opacity = 0.5) => {
      const style = `background: var(--${tint}); opacity: ${tint === 'block' || tint === 'hole' ? 1 : opacity}`;
      keys.append(html('span', { class: 'key' }, html('span', { class: 'swatch', style }), text));
    };
    const blocks = shown().flatMap((panel) => panel.blocks).filter((block) => block.status !== FREE);
    const names = {
      state: () => STATES.slice(0, FREE).forEach((text, status) => blocks.some((block) => block.status === status) && add(STATE_TINTS[status], text)),
      category: () => data.categories.forEach((text, place) => blocks.some((block) => block.category === place) && add(TINTS[place], text)),
      stream: () => [...new Set(blocks.map((block) => block.segment[1]))].sort((a, b) => a - b).forEach((stream) => add(TINTS[stream % UNKNOWN_CATEGORY], `stream ${stream}`)),
      site: () => {
        const panel = pair[0];
        panel.sites.forEach((tint, site) => add(tint, shortSite(panel.map.sites[site])));
        add('block', 'other call sites, or unknown');
      },
      age: () => {
        for (let age = 0; age < AGES; age += 1) add('c0', age === 0 ? 'just requested' : age === AGES - 1 ? 'old' : '', ageOpacity(age));
      },
    };
    names[colours.value]();
    add('hole', 'hole: reserved and free');
    keys.append(html('span', { class: 'key' }, '| a segment begins'));
  }

  function point(event, panel) {
    const { block } = event.target;
    readout.hidden = !block;
    if (!block) return;
    const lines = [`${ofBytes(block.size)}, ${STATES[block.status]}`];
    if (block.blocks > 1) {
      lines[0] = `${ofBytes(block.size)} in ${count(block.blocks)} blocks too small to draw`;
      lines.push(`${ofBytes(block.free)} of it free in ${plural(block.holes, 'hole', 'holes')}`);
    }
    if (block.status !== FREE) lines.push(data.categories[block.category]);
    if (block.site >= 0) lines.push(panel.map.sites[block.site]);
    if (block.born >= 0) lines.push(`requested at event ${count(block.born)}, ${count(panel.frame.event - block.born)} events ago`);
    const [pieces, stream, pool] = block.segment;
    lines.push(`${pieces > 1 ? `${pieces} small segments` : 'segment'} of ${pool || 'memory'}, stream ${stream}`);
    readout.replaceChildren(...lines.flatMap((line, place) => (place ? [html('br'), line] : [html('strong', {}, line)])));
    const box = host.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    readout.style.left = `${Math.max(0, Math.min(x + 14, box.width - readout.offsetWidth))}px`;
    readout.style.top = `${y + 18}px`;
  }

  /** What blocks can be coloured by: what the data has. */
  function offerColours() {
    const wanted = pageState.get('map-colour') || colours.value || 'state';
    const { map } = pair[0];
    const blocks = map.frames.flatMap(blocksOfFrame).filter((block) => block.status !== FREE);
    const offers = [
      ['state', 'state', true],
      ['category', 'category', blocks.some((block) => block.category !== UNKNOWN_CATEGORY)],
      ['stream', 'stream', blocks.some((block) => block.segment[1] > 0)],
      ['site', 'call site', blocks.some((block) => block.site >= 0)],
      ['age', 'age', blocks.some((block) => block.born >= 0)],
    ];
    colours.replaceChildren(...offers.filter(([, , known]) => known).map(([value, text]) => html('option', { value }, text)));
    colours.value = offers.some(([value, , known]) => known && value === wanted) ? wanted : 'state';
  }

  /** The moments of all maps that are shown, in order. */
  function collect(wanted) {
    const seen = new Set();
    moments = shown().flatMap((panel) => panel.map.frames.map(({ event, occasion }) => ({ event, occasion })));
    // Before the first picture of one of them, nothing is known about it.
    const begin = Math.max(...shown().map((panel) => panel.map.frames[0].event));
    moments = moments.filter(({ event }) => event >= begin);
    moments.sort((one, other) => one.event - other.event);
    moments = moments.filter(({ event, occasion }) => !seen.has(`${event} ${occasion}`) && seen.add(`${event} ${occasion}`));
    const at = (test) => moments.findIndex(test);
    const places = [
      at((moment) => `${moment.event}` === wanted && moment.occasion !== 'regular'), at((moment) => `${moment.event}` === wanted),
      at((moment) => moment.occasion === 'out_of_memory'), at((moment) => moment.occasion === 'peak'), 0,
    ];
    choose(places.find((place) => place >= 0));
  }

  function open(place, wanted = null) {
    const map = maps[place];
    picker.value = place;
    pair[0].open(map);
    const others = maps.map((other, at) => [other, at]).filter(([other, at]) => at !== place && other.title === map.title);
    beside.replaceChildren(html('option', { value: '' }, 'nothing'), ...others.map(([other, at]) => html('option', { value: at }, data.strategies[other.strategy])));
    beside.parentElement.hidden = others.length === 0;
    const other = pageState.get('map-beside');
    beside.value = others.some(([, at]) => `${at}` === other) ? other : '';
    offerColours();
    compare(wanted);
  }

  function compare(wanted) {
    if (beside.value !== '') pair[1].open(maps[Number(beside.value)]);
    panels.replaceChildren(...shown().map((panel) => panel.root));
    panels.classList.toggle('two', shown().length > 1);
    collect(wanted);
  }

  const step = (by) => {
    choose(chosen + by);
    pageState.set('map-event', moments[chosen].event);
  };
  pair[0].picture.addEventListener('keydown', (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    step(by);
  });
  picker.addEventListener('change', () => {
    pageState.set('map', picker.value);
    pageState.set('map-beside', null);
    pageState.set('map-event', null);
    open(Number(picker.value));
  });
  beside.addEventListener('change', () => {
    pageState.set('map-beside', beside.value || null);
    compare(`${moments[chosen].event}`);
  });
  colours.addEventListener('change', () => {
    pageState.set('map-colour', colours.value);
    choose(chosen);
  });
  slider.addEventListener('input', () => step(Number(slider.value) - chosen));
  previous.addEventListener('click', () => step(-1));
  next.addEventListener('click', () => step(1));
  host.append(
    html('div', { class: 'controls' }, html('label', {}, 'Case', picker), html('label', {}, 'Beside it', beside), html('label', {}, 'Colour by', colours)),
    html('div', { class: 'controls' }, html('span', { class: 'group' }, 'Moment', previous, slider, next)),
    panels,
    readout,
    keys,
  );
  // Cases that ran out of memory come first.
  const stored = Number(pageState.get('map') ?? NaN);
  const failed = maps.findIndex((map) => map.failed);
  open(maps[stored] ? stored : Math.max(0, failed), pageState.get('map-event'));
  new ResizeObserver(draw).observe(host);
}

/** The end of a long call site: file and line. */
function shortSite(site) {
  return site.length > 60 ? `…${site.slice(-58)}` : site;
}

