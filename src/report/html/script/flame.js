// Who holds memory: names as nested bars, callers above what they call. The width of a bar is its bytes.

const FLAME_ROW = 22;
const FLAME_FONT = '12px system-ui, sans-serif';

/** A node of the data as an object; `parent` is null for the first one. */
function flameNode([name, kib, blocks, installed, below], parent) {
  const node = { name, kib, blocks, installed, parent, depth: parent ? parent.depth + 1 : 0, children: [] };
  node.children = below.map((child) => flameNode(child, node));
  return node;
}

/** The same tree without the frames of installed packages, except those that requested memory themselves. */
function withoutInstalled(nodes) {
  const found = new Map();
  const add = (node) => {
    const key = node[0];
    const known = found.get(key);
    if (!known) found.set(key, [...node]);
    else found.set(key, [key, known[1] + node[1], known[2] + node[2], known[3], [...known[4], ...node[4]]]);
  };
  const lift = (node) => {
    const isInner = node[3] && node[4].length > 0;
    if (isInner) node[4].forEach(lift);
    else add(node);
  };
  nodes.forEach(lift);
  return [...found.values()]
    .map(([name, kib, blocks, installed, below]) => [name, kib, blocks, installed, withoutInstalled(below)])
    .sort((a, b) => b[1] - a[1]);
}

/** `file.py:7 function` as [`function`, `file.py:7`]: folders are only in the readout. */
function shortFrame(name) {
  const [, place, called] = /^(\S+:\d+) (.+)$/.exec(name) || [];
  if (!place) return [name, ''];
  const file = place.split('/').pop();
  return called === '<module>' ? [file, ''] : [called, file];
}

function drawFlame(host, flame, index, data) {
  const key = `flame${index || ''}`;
  const hasInstalled = (nodes) => nodes.some((node) => (node[3] && node[4].length > 0) || hasInstalled(node[4]));
  const canFold = flame.by === 'stack' && hasInstalled(flame.roots);
  const state = { frames: canFold ? 'own' : 'all', root: null, zoomed: null, focus: null };
  const picture = svg('svg', { class: 'plot flame', tabindex: 0, role: 'application', 'aria-label': `Who holds memory: ${flame.title}. Arrow keys move, Enter zooms, Escape shows all.` });
  const readout = html('div', { class: 'readout', role: 'status', 'aria-live': 'polite', hidden: '' });
  const reset = html('button', { type: 'button', class: 'reset', hidden: '' }, 'Show all');
  const total = flame.total || 1;

  function build() {
    const below = state.frames === 'own' ? withoutInstalled(flame.roots) : flame.roots;
    state.root = flameNode(['all', flame.total, flame.blocks, false, below], null);
    state.zoomed = state.root;
    state.focus = null;
  }

  const path = (node) => (node.parent ? [...path(node.parent), node.parent.children.indexOf(node)] : []);
  const isAbove = (node, other) => { for (let at = other.parent; at; at = at.parent) if (at === node) return true; return false; };
  const share = (node) => `${((100 * node.kib) / total).toFixed(1)} %`;
  const deepest = (node) => Math.max(node.depth, ...node.children.map(deepest));

  function colourOf(node) {
    if (!node.parent) return 'flame-all';
    if (flame.by === 'tag') {
      let top = node;
      while (top.parent.parent) top = top.parent;
      const place = data.categories.indexOf(top.name);
      return place >= 0 ? `c${place}` : 'c6';
    }
    if (!/:\d+ /.test(node.name)) return 'flame-all';
    return node.installed ? 'flame-installed' : 'flame-own';
  }

  function bar(node, x, width) {
    if (width < 0.5) return;
    const y = node.depth * FLAME_ROW;
    const group = svg('g', { class: `frame ${colourOf(node)}` }, picture);
    group.node = node;
    node.shown = { x, y, width };
    svg('rect', { x: x.toFixed(2), y, width: Math.max(0.5, width - 1).toFixed(2), height: FLAME_ROW - 2, rx: 2 }, group);
    if (width < 34) return;
    const [called, place] = shortFrame(node.name);
    const text = node.parent ? `${called}${place && `  ${place}`}  ${bytes(node.kib)}` : `all: ${bytes(node.kib)} in ${count(node.blocks)} blocks`;
    svg('text', { x: (x + 5).toFixed(2), y: y + 14 }, group).textContent = fitted(text, width - 10, FLAME_FONT);
  }

  function spread(node, x, width) {
    bar(node, x, width);
    if (width < 0.5) return;
    let at = x;
    for (const child of node.children) {
      const wide = node.kib ? (child.kib / node.kib) * width : 0;
      spread(child, at, wide);
      at += wide;
    }
  }

  function draw() {
    const width = Math.max(280, host.clientWidth);
    const height = (deepest(state.zoomed) + 1) * FLAME_ROW + 4;
    picture.setAttribute('viewBox', `0 0 ${width} ${height}`);
    picture.style.height = `${height}px`;
    host.style.minHeight = '0';
    picture.replaceChildren();
    // The callers of the chosen bar are as wide as it is.
    for (let at = state.zoomed.parent; at; at = at.parent) bar(at, 0, width);
    spread(state.zoomed, 0, width);
    reset.hidden = state.zoomed === state.root;
    if (state.focus) mark(state.focus);
  }

  function zoom(node) {
    state.zoomed = node;
    pageState.set(key, node === state.root ? null : `${state.frames}.${path(node).join('.')}`);
    draw();
  }

  function mark(node) {
    picture.querySelectorAll('.chosen').forEach((other) => other.classList.remove('chosen'));
    const group = [...picture.children].find((child) => child.node === node);
    if (group) group.classList.add('chosen');
  }

  function tell(node, x, y) {
    readout.hidden = !node;
    if (!node) return;
    const lines = [`${bytes(node.kib)}, ${share(node)} of all, in ${count(node.blocks)} blocks`];
    const self = node.kib - node.children.reduce((sum, child) => sum + child.kib, 0);
    if (node.parent && node.children.length && self > 0) lines.push(`${bytes(self)} of it by this line itself`);
    if (node.installed) lines.push('an installed package');
    readout.replaceChildren(html('strong', {}, node.name), ...lines.flatMap((line) => [html('br'), line]));
    const room = host.clientWidth - readout.offsetWidth;
    readout.style.left = `${Math.max(0, Math.min(x + 12, room))}px`;
    readout.style.top = `${picture.offsetTop + y + 18}px`;
  }

  function focusOn(node) {
    if (!node) return;
    // A bar that the zoom hides comes into view.
    if (node !== state.zoomed && !isAbove(state.zoomed, node) && !isAbove(node, state.zoomed)) zoom(node.parent);
    state.focus = node;
    draw();
    const { x, y } = node.shown || { x: 0, y: node.depth * FLAME_ROW };
    tell(node, x, y);
  }

  const nodeAt = (event) => event.target.closest?.('g.frame')?.node;
  picture.addEventListener('pointermove', (event) => {
    const box = picture.getBoundingClientRect();
    const node = nodeAt(event);
    if (node) mark(node);
    tell(node, event.clientX - box.left, event.clientY - box.top);
  });
  picture.addEventListener('pointerleave', () => tell(null));
  picture.addEventListener('blur', () => tell(null));
  picture.addEventListener('click', (event) => {
    const node = nodeAt(event);
    if (node) zoom(node);
  });
  picture.addEventListener('keydown', (event) => {
    const now = state.focus || state.zoomed;
    const beside = (step) => now.parent?.children[now.parent.children.indexOf(now) + step];
    const actions = {
      ArrowDown: () => focusOn(state.focus ? now.children[0] : now),
      ArrowUp: () => focusOn(now.parent),
      ArrowLeft: () => focusOn(beside(-1)),
      ArrowRight: () => focusOn(beside(1)),
      Enter: () => { zoom(now); focusOn(now); },
      Escape: () => { state.focus = null; zoom(state.root); tell(null); },
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  });
  reset.addEventListener('click', () => zoom(state.root));

  // What the address says: the frames, and the path of the chosen bar.
  const [frames, ...places] = (pageState.get(key) || '').split('.');
  if (canFold && (frames === 'own' || frames === 'all')) state.frames = frames;
  build();
  state.zoomed = places.reduce((node, place) => node.children[Number(place)] || node, state.root);
  const controls = html('div', { class: 'controls' });
  if (canFold) {
    controls.append(segmented('Frames', [['own', 'your code'], ['all', 'all']], state.frames, (chosen) => {
      state.frames = chosen;
      build();
      zoom(state.root);
    }));
  }
  controls.append(reset);
  const keys = html('div', { class: 'keys' });
  if (flame.by === 'stack') {
    keys.append(html('span', { class: 'key' }, html('span', { class: 'swatch flame-own' }), 'your code'));
    keys.append(html('span', { class: 'key' }, html('span', { class: 'swatch flame-installed' }), 'installed packages and Python'));
    keys.append(html('span', { class: 'key' }, html('span', { class: 'swatch flame-all' }), 'not known, or many small ones'));
  }
  host.append(controls, picture, readout, keys);
  new ResizeObserver(draw).observe(host);
  draw();
}

