// A plot: axes, a crosshair with values, zoom by drag, wheel and keys.

const MARGIN = { left: 66, right: 14, top: 14, bottom: 34 };
let plots = 0;

class Plot {
  /**
   * `options`: `label`, `domain()` of the horizontal axis, `highest(from, to)` in KiB, `tick(x)`, `draw(plot, layer)` and
   * `read(x)`, which gives a title and rows of [colour class, name, value].
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
    new ResizeObserver(() => this.draw()).observe(host);
    this.draw();
  }

  /** Zooms to this part of the horizontal axis. */
  show([from, to]) {
    const [first, last] = this.options.domain();
    const least = (last - first) / 1e5 || 1;
    const width = Math.min(Math.max(to - from, least), last - first || 1);
    const start = Math.min(Math.max(from, first), last - width);
    this.view = [start, start + width];
    this.reset.hidden = width >= last - first;
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
    this.height = this.width < 500 ? 250 : 320;
    this.inner = this.width - MARGIN.left - MARGIN.right;
    this.top = Math.max(1, this.options.highest(...this.view)) * 1.06;
    this.root.setAttribute('viewBox', `0 0 ${this.width} ${this.height}`);
    this.root.style.height = `${this.height}px`;
    this.root.replaceChildren();
    this.axes();
    const clip = svg('clipPath', { id: this.id }, svg('defs', {}, this.root));
    svg('rect', { x: MARGIN.left, y: 0, width: this.inner, height: this.height - MARGIN.bottom + 1 }, clip);
    const layer = svg('g', { 'clip-path': `url(#${this.id})` }, this.root);
    this.options.draw(this, layer);
    this.overlay = svg('g', {}, this.root);
    this.point();
  }

  axes() {
    const floor = this.height - MARGIN.bottom;
    for (const tick of memoryTicks(this.top, 5)) {
      const y = this.y(tick);
      svg('line', { class: 'grid', x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y, y2: y }, this.root);
      svg('text', { x: MARGIN.left - 8, y: y + 4, 'text-anchor': 'end' }, this.root).textContent = bytes(tick);
    }
    for (const tick of ticks(...this.view, this.width < 500 ? 3 : 7)) {
      const x = this.x(tick);
      svg('line', { class: 'axis', x1: x, x2: x, y1: floor, y2: floor + 5 }, this.root);
      const anchor = x > this.width - 40 ? 'end' : 'middle';
      svg('text', { x, y: floor + 20, 'text-anchor': anchor }, this.root).textContent = this.options.tick(tick);
    }
    svg('line', { class: 'axis', x1: MARGIN.left, x2: this.width - MARGIN.right, y1: floor, y2: floor }, this.root);
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

  /** A horizontal line with a label. */
  level(layer, kib, className, text) {
    const y = this.y(kib);
    svg('line', { class: className, x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y, y2: y }, layer);
    svg('text', { x: this.width - MARGIN.right - 4, y: y - 5, 'text-anchor': 'end' }, layer).textContent = text;
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
    const body = html('table', { role: 'presentation' });
    for (const [colour, name, text, level] of rows) {
      body.append(html('tr', {}, html('td', {}, html('span', { class: `swatch ${colour}` }), name), html('td', { class: 'number' }, text)));
      if (level !== undefined) svg('circle', { class: `point ${colour}`, cx: x, cy: this.y(level), r: 4 }, this.overlay);
    }
    this.readout.replaceChildren(html('strong', {}, title), body);
    this.readout.hidden = false;
    const beside = x + 16 + this.readout.offsetWidth > this.width ? x - 16 - this.readout.offsetWidth : x + 16;
    this.readout.style.left = `${Math.max(0, beside)}px`;
    const [frame, own] = [this.host, this.root].map((element) => element.getBoundingClientRect().top);
    this.readout.style.top = `${own - frame + MARGIN.top}px`;
  }

  moveTo(value) {
    this.cursor = Math.min(Math.max(value, this.view[0]), this.view[1]);
    this.point();
  }

  zoom(factor, around) {
    const [from, to] = this.view;
    this.show([around - (around - from) * factor, around + (to - around) * factor]);
  }

  listen() {
    const pixel = (event) => event.clientX - this.root.getBoundingClientRect().left;
    let from;
    this.root.addEventListener('pointerdown', (event) => {
      if (event.button === 0) from = pixel(event);
    });
    this.root.addEventListener('pointermove', (event) => {
      this.moveTo(this.valueAt(pixel(event)));
      if (from === undefined) return;
      const [left, right] = [from, pixel(event)].sort((a, b) => a - b);
      if (right - left < 6) return;
      svg('rect', { class: 'selection', x: left, y: MARGIN.top, width: right - left, height: this.height - MARGIN.top - MARGIN.bottom }, this.overlay);
    });
    window.addEventListener('pointerup', (event) => {
      if (from === undefined) return;
      const [left, right] = [from, pixel(event)].sort((a, b) => a - b);
      from = undefined;
      if (right - left >= 6) this.show([this.valueAt(left), this.valueAt(right)]);
    });
    this.root.addEventListener('pointerleave', () => {
      this.cursor = undefined;
      this.point();
    });
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
        Escape: () => { this.cursor = undefined; this.point(); },
      };
      if (!actions[event.key]) return;
      event.preventDefault();
      actions[event.key]();
    });
  }
}

