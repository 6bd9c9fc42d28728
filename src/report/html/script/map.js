// The memory map: segments in address order, wrapped into rows like words in a text.

const STATES = ['in use', 'waiting for a stream', 'lent', 'free'];
const STATE_COLOURS = ['c0', 'c4', 'c3', 'free'];
const OCCASIONS = { regular: 'on the way', peak: 'peak', out_of_memory: 'out of memory', end: 'end' };
const AGES = 5;

function drawMap(host, maps, data) {
  const state = { map: 0, frame: 0, by: 'state' };
  const picture = svg('svg', { class: 'map', role: 'img', tabindex: 0 });
  const readout = html('div', { class: 'readout', role: 'status', 'aria-live': 'polite', hidden: '' });
  const facts = html('p', { class: 'facts', 'aria-live': 'polite' });
  const keys = html('div', { class: 'keys' });
  const slider = html('input', { type: 'range', min: 0, step: 1, 'aria-label': 'Moment' });
  const previous = html('button', { type: 'button', 'aria-label': 'Earlier moment' }, '←');
  const next = html('button', { type: 'button', 'aria-label': 'Later moment' }, '→');
  const picker = html('select', { 'aria-label': 'Case' });
  maps.forEach((map, place) => picker.append(html('option', { value: place }, `${map.title} · ${data.strategies[map.strategy]}`)));

  const frames = () => maps[state.map].frames;
  const blocksOf = (segment) => {
    const blocks = [];
    for (let i = 0; i < segment[3].length; i += 4) {
      const [kib, status, category, born] = segment[3].slice(i, i + 4);
      blocks.push({ kib, status, category, born });
    }
    return blocks;
  };
  const sum = (list) => list.reduce((total, value) => total + value, 0);
  const total = (frame) => sum(frame.segments.map((segment) => sum(blocksOf(segment).map((block) => block.kib))));

  // New blocks are pale and old ones dark, on a logarithmic scale of events.
  const ageOf = (block, event) => {
    if (block.born < 0) return 0;
    const share = Math.log2(1 + Math.max(0, event - block.born)) / Math.log2(2 + event);
    return Math.min(AGES - 1, Math.floor(share * AGES));
  };
  const paint = (block, event) => {
    if (block.status === 3) return { class: 'free' };
    if (state.by === 'category') return { class: `c${block.category}`, fill: 'currentColor' };
    if (state.by === 'age') return { class: 'c0', fill: 'currentColor', 'fill-opacity': 0.2 + (0.8 * ageOf(block, event)) / (AGES - 1) };
    return { class: STATE_COLOURS[block.status], fill: 'currentColor' };
  };

  function draw() {
    const frame = frames()[state.frame];
    const width = Math.max(280, host.clientWidth);
    const rows = width < 500 ? 28 : 22;
    const [height, gap] = [width < 500 ? 10 : 14, 4];
    const most = Math.max(1, ...frames().map(total));
    const perRow = most / rows;
    const scale = width / perRow;
    picture.setAttribute('viewBox', `0 0 ${width} ${rows * (height + gap) + gap}`);
    picture.style.height = `${rows * (height + gap) + gap}px`;
    picture.setAttribute('aria-label', `Memory of ${picker.selectedOptions[0].textContent}: ${facts.textContent}`);
    picture.replaceChildren();
    let at = 0;
    for (const segment of frame.segments) {
      const blocks = blocksOf(segment);
      const end = at + sum(blocks.map((block) => block.kib));
      for (const block of blocks) {
        let left = block.kib;
        while (left > 0) {
          const row = Math.min(rows - 1, Math.floor(at / perRow + 1e-9));
          const piece = Math.min(left, Math.max((row + 1) * perRow - at, 1e-6));
          const from = (at - row * perRow) * scale;
          // A small gap after a segment.
          const space = end - at - piece < 0.5 ? 1.5 : 0;
          const rect = svg('rect', { ...paint(block, frame.event), x: from.toFixed(2), y: row * (height + gap) + gap, width: Math.max(0.4, piece * scale - space).toFixed(2), height }, picture);
          rect.block = block;
          rect.segment = segment;
          left -= piece;
          at += piece;
          if (row === rows - 1 && left < perRow * 1e-6) break;
        }
      }
    }
  }

  function tell() {
    const frame = frames()[state.frame];
    const blocks = frame.segments.flatMap(blocksOf);
    const of = (status) => blocks.filter((block) => block.status === status);
    const [used, waiting, free] = [0, 1, 3].map(of);
    const size = (list) => bytes(sum(list.map((block) => block.kib)));
    const pieces = sum(frame.segments.map((segment) => segment[0]));
    const largest = Math.max(0, ...free.map((block) => block.kib));
    const parts = [html('b', {}, `${OCCASIONS[frame.occasion]}, event ${count(frame.event)}`), `: ${size(used)} allocated`];
    if (waiting.length) parts.push(`, ${size(waiting)} waiting for a stream`);
    parts.push(free.length ? `, ${size(free)} free in ${count(free.length)} pieces, the largest ${bytes(largest)}` : ', nothing free');
    parts.push(`, in ${count(pieces)} segments`);
    facts.replaceChildren(...parts);
    previous.disabled = state.frame === 0;
    next.disabled = state.frame === frames().length - 1;
    slider.value = state.frame;
    slider.setAttribute('aria-valuetext', `${OCCASIONS[frame.occasion]}, event ${frame.event}`);
    legend(blocks);
    draw();
  }

  function legend(blocks) {
    keys.replaceChildren();
    const add = (colour, text, style = '') => {
      const swatch = html('span', { class: `swatch ${colour}`, style });
      keys.append(html('span', { class: 'key' }, swatch, text));
    };
    const outline = 'background: none; outline: 1px solid var(--soft)';
    if (state.by === 'state') {
      STATES.forEach((text, status) => {
        if (status !== 3 && blocks.some((block) => block.status === status)) add(STATE_COLOURS[status], text);
      });
    } else if (state.by === 'category') {
      data.categories.forEach((text, place) => {
        if (blocks.some((block) => block.status !== 3 && block.category === place)) add(`c${place}`, text);
      });
    } else {
      for (let age = 0; age < AGES; age += 1) {
        add('c0', age === 0 ? 'just asked for' : age === AGES - 1 ? 'there from the beginning' : '', `opacity: ${0.2 + (0.8 * age) / (AGES - 1)}`);
      }
    }
    add('', 'free', outline);
  }

  function choose(frame) {
    state.frame = Math.min(Math.max(0, frame), frames().length - 1);
    tell();
  }

  function open(map) {
    state.map = map;
    slider.max = frames().length - 1;
    const special = frames().findIndex((frame) => frame.occasion === 'out_of_memory');
    const peak = frames().findIndex((frame) => frame.occasion === 'peak');
    choose(special >= 0 ? special : Math.max(0, peak));
  }

  picture.addEventListener('pointermove', (event) => {
    const { block, segment } = event.target;
    readout.hidden = !block;
    if (!block) return;
    const frame = frames()[state.frame];
    const lines = [`${bytes(block.kib)}, ${STATES[block.status]}`];
    if (block.status !== 3) lines.push(data.categories[block.category]);
    if (block.born >= 0) lines.push(`requested at event ${count(block.born)}, ${count(frame.event - block.born)} events ago`);
    const pieces = segment[0] > 1 ? `${segment[0]} small segments` : 'segment';
    lines.push(`${pieces} of ${segment[2] || 'memory'}, stream ${segment[1]}`);
    readout.replaceChildren(...lines.flatMap((line, place) => (place ? [html('br'), line] : [html('strong', {}, line)])));
    const box = host.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    readout.style.left = `${Math.max(0, Math.min(x + 14, box.width - readout.offsetWidth))}px`;
    readout.style.top = `${y + 18}px`;
  });
  picture.addEventListener('pointerleave', () => { readout.hidden = true; });
  picture.addEventListener('keydown', (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    choose(state.frame + step);
  });
  picker.addEventListener('change', () => open(Number(picker.value)));
  slider.addEventListener('input', () => choose(Number(slider.value)));
  previous.addEventListener('click', () => choose(state.frame - 1));
  next.addEventListener('click', () => choose(state.frame + 1));
  const by = segmented('Colour by', [['state', 'state'], ['category', 'tag'], ['age', 'age']], state.by, (how) => {
    state.by = how;
    tell();
  });
  host.append(
    html('div', { class: 'controls' }, html('label', {}, 'Case', picker), by),
    html('div', { class: 'controls' }, html('span', { class: 'group' }, 'Moment', previous, slider, next)),
    facts,
    picture,
    readout,
    keys,
  );
  new ResizeObserver(draw).observe(host);
  // Cases that ran out of memory come first.
  const failed = maps.findIndex((map) => map.frames.some((frame) => frame.occasion === 'out_of_memory'));
  picker.value = Math.max(0, failed);
  open(Math.max(0, failed));
}

