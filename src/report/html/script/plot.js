// A plot: axes with titles, a crosshair with values, zoom by drag, wheel and keys.

const MARGIN = { left: 74, right: 14, top: 36, bottom: 50 };
/** From this width on, lines are named at their ends. */
const WIDE = 640;
let plots = 0;

/**
 * Charts of one workload show the same moment. A member is told the others' moment by `follow({ event, step })`, or null
 * when the cursor leaves; what it does not know is undefined.
 */
const cursors = {
  members: new Map(),
  join(name, member) {
    if (!this.members.has(name)) this.members.set(name, new Set());
    this.members.get(name).add(member);
  },
  move(name, from, moment) {
    for (const member of this.members.get(name) || []) if (member !== from) member.follow(moment);
  },
};

class Plot {
  /**
   * `options`: `label`, `domain()` of the horizontal axis, `highest(from, to)` in KiB, `tick(x)`, `titles()` of the horizontal
   * and the vertical axis, `draw(plot, layer)`, and `read(x)`, which gives a title and rows of [swatch classes, name, value,
   * level]. Optional: `ends()`, the lines to name at their ends; `zoom`, the name of the zoom in the address; `link`, with
   * `name`, `moment(x)` and `place(moment)`, for a cursor shared with other charts.
   */
  constructor(host, options) {
    this.host = host;
    this.options = options;
    this.view = options.domain();
    this.id = `clip${(plots += 1)}`;
    this.root = svg('svg', { class: 'plot', tabindex: 0, role: 'application', 'aria-label': `${options.label}. Arrow keys read values, plus and minus zoom, 0 shows all.` });
    this.readout = html('div', { class: 'readout', role: 'status', 'aria-live': 'polite', hidden: '' });
    this.reset = html('button', { type: 'button', class: 'reset', hidden: '' }, 'Show all');
    this.reset.addEventListener('click', () => this.show(options.domain()));
    host.append(this.root, this.readout);
    this.listen();
    if (options.link) cursors.join(options.link.name, this);
    new ResizeObserver(() => this.draw()).observe(host);
    const stored = (options.zoom && pageState.get(options.zoom) || '').split('-').map(Number);
    if (stored.length === 2 && stored[1] > stored[0]) this.show(stored);
    else this.draw();
  }

  /** Zooms to this part of the horizontal axis. */
  show([from, to]) {
    const [first, last] = this.options.domain();
    const least = (last - first) / 1e5 || 1;
    const width = Math.min(Math.max(to - from, least), last - first || 1);
    const start = Math.min(Math.max(from, first), last - width);
    this.view = [start, start + width];
    this.reset.hidden = width >= last - first;
    if (this.options.zoom) pageState.set(this.options.zoom, this.reset.hidden ? null : this.view.map(Math.round).join('-'));
    this.cursor = undefined;
    this.draw();
  }

  x(value) {
    const [from, to] = this.view;
    return MARGIN.left + ((value - from) / (to - from || 1)) * this.inner;
  }

  y(kib) {
    return this.height - MARGIN.bottom - (kib / this.top) * (this.height - MARGIN.top - MARGIN.bottom);
  }

  valueAt(pixel) {
    const [from, to] = this.view;
    return from + ((pixel - MARGIN.left) / this.inner) * (to - from);
  }

  draw() {
    this.width = Math.max(280, this.host.clientWidth);
    this.height = this.width < 500 ? 280 : 350;
    const ends = this.width >= WIDE && this.options.ends ? this.options.ends() : [];
    const longest = Math.max(0, ...ends.map(({ text }) => text.length));
    this.right = this.width - MARGIN.right - (longest ? Math.min(230, 24 + 6.4 * longest) : 0);
    this.inner = this.right - MARGIN.left;
    this.top = Math.max(1, this.options.highest(...this.view)) * 1.08;
    this.root.setAttribute('viewBox', `0 0 ${this.width} ${this.height}`);
    this.root.style.height = `${this.height}px`;
    this.root.replaceChildren();
    this.axes();
    const clip = svg('clipPath', { id: this.id }, svg('defs', {}, this.root));
    svg('rect', { x: MARGIN.left, y: MARGIN.top - 2, width: this.inner, height: this.height - MARGIN.top - MARGIN.bottom + 3 }, clip);
    const layer = svg('g', { 'clip-path': `url(#${this.id})` }, this.root);
    this.options.draw(this, layer);
    this.nameEnds(ends);
    this.overlay = svg('g', {}, this.root);
    this.point();
  }

  axes() {
    const floor = this.height - MARGIN.bottom;
    const [across, up] = this.options.titles();
    svg('text', { class: 'title', x: 2, y: 13 }, this.root).textContent = up;
    svg('text', { class: 'title', x: this.right, y: this.height - 8, 'text-anchor': 'end' }, this.root).textContent = across;
    for (const tick of memoryTicks(this.top, 6)) {
      const y = this.y(tick);
      svg('line', { class: 'grid', x1: MARGIN.left, x2: this.right, y1: y, y2: y }, this.root);
      svg('text', { x: MARGIN.left - 8, y: y + 4, 'text-anchor': 'end' }, this.root).textContent = roundBytes(tick);
    }
    for (const tick of ticks(...this.view, this.width < 500 ? 3 : 7)) {
      const x = this.x(tick);
      svg('line', { class: 'axis', x1: x, x2: x, y1: floor, y2: floor + 5 }, this.root);
      const anchor = x > this.right - 24 ? 'end' : 'middle';
      svg('text', { x, y: floor + 20, 'text-anchor': anchor }, this.root).textContent = this.options.tick(tick);
    }
    svg('line', { class: 'axis', x1: MARGIN.left, x2: this.right, y1: floor, y2: floor }, this.root);
  }

  /** Names beside the ends of lines: `ends` are strategies with a text and the end of the line. Names that overlap are moved apart. */
  nameEnds(ends) {
    const apart = 14;
    const [low, high] = [MARGIN.top, this.height - MARGIN.bottom];
    const names = ends
      .map(({ strategy, text, x, level }) => ({ strategy, text, x: Math.min(this.x(x), this.right), at: Math.min(Math.max(this.y(level), low), high) }))
      .sort((a, b) => a.at - b.at);
    names.forEach((name, place) => { name.y = Math.max(name.at, place ? names[place - 1].y + apart : low); });
    for (let place = names.length - 1; place >= 0; place -= 1) {
      names[place].y = Math.min(names[place].y, place + 1 < names.length ? names[place + 1].y - apart : high);
    }
    for (const { strategy, text, x, at, y } of names) {
      svg('path', { class: `leader ${strategyClass(strategy)}`, d: `M${x.toFixed(1)} ${at.toFixed(1)}L${this.right + 8} ${y.toFixed(1)}` }, this.root);
      marker(strategy, this.right + 12, y, this.root);
      const name = svg('text', { class: 'end', x: this.right + 20, y: y + 4 }, this.root);
      name.textContent = text;
      if (text !== data.strategies[strategy]) svg('title', {}, name).textContent = data.strategies[strategy];
    }
  }

  /** The end of a series: a run that ended early has no line beyond it. */
  endOf(xs) {
    const last = xs[xs.length - 1];
    const stretch = xs.length > 1 ? last - xs[xs.length - 2] : 0;
    return this.x(Math.min(last + stretch, this.view[1], this.options.domain()[1])).toFixed(1);
  }

  /** A step line, with a band where a section has a minimum and a maximum. */
  line(layer, xs, band, colour, dash, className = 'line') {
    const [from, to] = this.view;
    const first = placeOf(xs, from);
    const last = Math.min(xs.length - 1, placeOf(xs, to) + 1);
    let path = '';
    for (let i = first; i <= last; i += 1) {
      const x = this.x(xs[i]).toFixed(1);
      path += `${i === first ? 'M' : `H${x}V`}${i === first ? `${x} ` : ''}${this.y(band.max[i]).toFixed(1)}`;
    }
    if (last === xs.length - 1) path += `H${this.endOf(xs)}`;
    if (band.min) {
      let area = path;
      for (let i = last; i >= first; i -= 1) area += `V${this.y(band.min[i]).toFixed(1)}H${this.x(xs[i]).toFixed(1)}`;
      svg('path', { class: `band ${colour}`, d: `${area}Z` }, layer);
    }
    svg('path', { class: `${className} ${colour}`, d: path, 'stroke-dasharray': dash || 'none' }, layer);
  }

  /** A filled shape down to `floor`, or to the axis. */
  area(layer, xs, values, attributes, floor = null) {
    const [from, to] = this.view;
    const first = placeOf(xs, from);
    const last = Math.min(xs.length - 1, placeOf(xs, to) + 1);
    const right = this.endOf(xs);
    let path = `M${this.x(xs[first]).toFixed(1)} ${this.y(values[first]).toFixed(1)}`;
    for (let i = first + 1; i <= last; i += 1) path += `H${this.x(xs[i]).toFixed(1)}V${this.y(values[i]).toFixed(1)}`;
    path += `H${right}`;
    if (floor) {
      for (let i = last; i >= first; i -= 1) path += `V${this.y(floor[i]).toFixed(1)}H${this.x(xs[i]).toFixed(1)}`;
    } else {
      path += `V${this.y(0)}H${this.x(xs[first]).toFixed(1)}`;
    }
    svg('path', { ...attributes, d: `${path}Z` }, layer);
  }

  /** Some markers on the line of a strategy, each line at other places. */
  markers(layer, xs, values, strategy, turn, turns) {
    const end = Number(this.endOf(xs));
    for (let part = 0; part < 5; part += 1) {
      const x = MARGIN.left + this.inner * ((part + (turn + 0.5) / turns) / 5);
      if (x < this.x(xs[0]) || x > end) continue;
      marker(strategy, x, this.y(values[placeOf(xs, this.valueAt(x))]), layer);
    }
  }

  /** A horizontal line with a label at its left or right. */
  level(layer, kib, className, text, anchor = 'end') {
    const y = this.y(kib);
    svg('line', { class: className, x1: MARGIN.left, x2: this.right, y1: y, y2: y }, layer);
    svg('text', { x: anchor === 'end' ? this.right - 4 : MARGIN.left + 4, y: y - 5, 'text-anchor': anchor }, layer).textContent = text;
  }

  point() {
    this.overlay.replaceChildren();
    if (this.cursor === undefined) {
      this.readout.hidden = true;
      return;
    }
    const x = this.x(this.cursor);
    svg('line', { class: 'crosshair', x1: x, x2: x, y1: MARGIN.top, y2: this.height - MARGIN.bottom }, this.overlay);
    const { title, rows } = this.options.read(this.cursor);
    const body = html('div', { class: 'values' });
    // On a phone there is room for a few.
    const shown = rows.slice(0, this.width < 500 ? 6 : rows.length);
    for (const [swatches, name, text] of shown) {
      body.append(html('span', { class: 'name' }, html('span', { class: `swatch ${swatches}` }), name), html('span', { class: 'number' }, text));
    }
    for (const [swatches, , , level] of rows) {
      if (level !== undefined) svg('circle', { class: `point ${swatches.replace(/swatch|m\d/g, '')}`, cx: x, cy: this.y(level), r: 3.5 }, this.overlay);
    }
    body.classList.toggle('two', shown.length > 8);
    this.readout.replaceChildren(html('strong', {}, title), body);
    if (shown.length < rows.length) this.readout.append(html('small', {}, `${rows.length - shown.length} more`));
    this.readout.hidden = false;
    this.placeReadout(x);
  }

  /** Inside the plot, beside the crosshair. */
  placeReadout(x) {
    const own = this.root.offsetWidth ? this.root : this.host;
    const [frame, top] = [this.host.getBoundingClientRect().top, this.root.getBoundingClientRect().top];
    this.readout.style.maxWidth = `${own.clientWidth || this.width}px`;
    const width = this.readout.offsetWidth;
    const beside = x + 16 + width > this.width ? x - 16 - width : x + 16;
    this.readout.style.left = `${Math.min(Math.max(0, beside), Math.max(0, this.width - width))}px`;
    this.readout.style.top = `${top - frame + Math.max(0, Math.min(MARGIN.top, this.height - this.readout.offsetHeight))}px`;
  }

  /** Another chart of the workload shows this moment. */
  follow(moment) {
    if (!this.root.isConnected) return;
    const x = moment ? this.options.link.place(moment) : undefined;
    this.cursor = x >= this.view[0] && x <= this.view[1] ? x : undefined;
    this.point();
  }

  tell() {
    const { link } = this.options;
    if (link) cursors.move(link.name, this, this.cursor === undefined ? null : link.moment(this.cursor));
  }

  leave() {
    this.cursor = undefined;
    this.point();
    this.tell();
  }

  moveTo(value) {
    this.cursor = Math.min(Math.max(value, this.view[0]), this.view[1]);
    this.point();
    this.tell();
  }

  zoom(factor, around) {
    const [from, to] = this.view;
    this.show([around - (around - from) * factor, around + (to - around) * factor]);
  }

  listen() {
    const pixel = (event) => event.clientX - this.root.getBoundingClientRect().left;
    let from;
    this.root.addEventListener('pointerdown', (event) => {
      if (event.button !== 0) return;
      from = pixel(event);
      this.root.setPointerCapture(event.pointerId);
    });
    this.root.addEventListener('pointermove', (event) => {
      this.moveTo(this.valueAt(pixel(event)));
      if (from === undefined) return;
      const [left, right] = [from, pixel(event)].sort((a, b) => a - b);
      if (right - left < 6) return;
      svg('rect', { class: 'selection', x: left, y: MARGIN.top, width: right - left, height: this.height - MARGIN.top - MARGIN.bottom }, this.overlay);
    });
    this.root.addEventListener('pointerup', (event) => {
      if (from === undefined) return;
      const [left, right] = [from, pixel(event)].sort((a, b) => a - b);
      from = undefined;
      if (right - left >= 6) this.show([this.valueAt(left), this.valueAt(right)]);
    });
    this.root.addEventListener('pointerleave', () => this.leave());
    this.root.addEventListener('blur', () => this.leave());
    this.root.addEventListener('dblclick', () => this.show(this.options.domain()));
    // The wheel scrolls the page unless this plot has the focus.
    this.root.addEventListener('wheel', (event) => {
      if (!event.ctrlKey && !event.metaKey && document.activeElement !== this.root) return;
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.valueAt(pixel(event)));
    }, { passive: false });
    this.root.addEventListener('keydown', (event) => {
      const [first, last] = this.view;
      const now = this.cursor === undefined ? (first + last) / 2 : this.cursor;
      const step = (last - first) / (event.shiftKey ? 10 : 100);
      const actions = {
        ArrowLeft: () => this.moveTo(now - step),
        ArrowRight: () => this.moveTo(now + step),
        Home: () => this.moveTo(first),
        End: () => this.moveTo(last),
        '+': () => { this.zoom(0.5, now); this.moveTo(now); },
        '=': () => { this.zoom(0.5, now); this.moveTo(now); },
        '-': () => { this.zoom(2, now); this.moveTo(now); },
        0: () => this.show(this.options.domain()),
        Escape: () => this.leave(),
      };
      if (!actions[event.key]) return;
      event.preventDefault();
      actions[event.key]();
    });
  }
}

