// Addresses over time: every block is a rectangle. A picture may have a million of them, so it is computed pixel by pixel:
// every pixel is the mean of what it covers (paper, free memory, blocks), at every zoom.

const ADDRESS_MARGIN = { left: 78, right: 20, top: 26, bottom: 46 };
/** Rectangles per entry of the index that finds those in a part of the picture. */
const ADDRESS_CHUNK = 128;
/** Rectangles that begin one after another and are then put in order of their addresses, so that entries are compact. */
const ADDRESS_STRIP = 8192;
/** From this many rectangles on, views of more than half of the picture are made from a finer picture of all. */
const MANY_RECTANGLES = 100000;
const GRID = { width: 2048, height: 1024 };
/** The grid in which the page has what is not drawn one by one, the lowest addresses first. */
const SHADE = { columns: 96, rows: 64 };
/** Up to this many visible blocks are written as shapes into an SVG file; more as an image. */
const MOST_SHAPES = 60000;

/** Rectangles in typed arrays, with an index. `place` has the place of each in the columns. */
class Rectangles {
  constructor(columns, events, unit) {
    const length = columns.born.length;
    this.length = length;
    this.place = new Uint32Array(length).map((_, i) => i);
    for (let strip = 0; strip < length; strip += ADDRESS_STRIP) {
      this.place.subarray(strip, strip + ADDRESS_STRIP).sort((one, other) => columns.offset[one] - columns.offset[other]);
    }
    const born = new Float64Array(length);
    columns.born.forEach((step, i) => { born[i] = (i ? born[i - 1] : 0) + step; });
    [this.from, this.to, this.low, this.high] = [0, 1, 2, 3].map(() => new Float64Array(length));
    for (let i = 0; i < length; i += 1) {
      const place = this.place[i];
      this.from[i] = born[place];
      this.to[i] = columns.life[place] === 0 ? Math.max(events, born[place] + 1) : born[place] + columns.life[place];
      this.low[i] = columns.offset[place] * unit;
      this.high[i] = this.low[i] + columns.size[place] * unit;
    }
    this.index();
  }

  /** The bounds of each chunk. */
  index() {
    const chunks = Math.ceil(this.length / ADDRESS_CHUNK);
    this.bounds = new Float64Array(chunks * 4);
    for (let chunk = 0; chunk < chunks; chunk += 1) {
      let [from, to, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
      for (let i = chunk * ADDRESS_CHUNK; i < Math.min(this.length, (chunk + 1) * ADDRESS_CHUNK); i += 1) {
        from = Math.min(from, this.from[i]);
        to = Math.max(to, this.to[i]);
        low = Math.min(low, this.low[i]);
        high = Math.max(high, this.high[i]);
      }
      this.bounds.set([from, to, low, high], chunk * 4);
    }
  }

  /** Those that meet a condition. */
  only(test) {
    const kept = [];
    for (let i = 0; i < this.length; i += 1) if (test(this.from[i], this.to[i], this.low[i], this.high[i])) kept.push(i);
    const other = Object.create(Rectangles.prototype);
    other.length = kept.length;
    for (const name of ['place', 'from', 'to', 'low', 'high']) other[name] = this[name].constructor.from(kept, (i) => this[name][i]);
    other.index();
    return other;
  }

  /** The same rectangles on another horizontal axis, which keeps their order. */
  along(axis) {
    const other = Object.create(Rectangles.prototype);
    Object.assign(other, this, { from: this.from.map(axis), to: this.to.map(axis) });
    other.index();
    return other;
  }

  /** Calls `visit(first, last)` for each run of rectangles that may lie in this part. */
  visit([from, to, low, high], visit) {
    for (let chunk = 0; chunk * 4 < this.bounds.length; chunk += 1) {
      const at = chunk * 4;
      if (this.bounds[at] < to && this.bounds[at + 1] > from && this.bounds[at + 2] < high && this.bounds[at + 3] > low) {
        visit(chunk * ADDRESS_CHUNK, Math.min(this.length, (chunk + 1) * ADDRESS_CHUNK));
      }
    }
  }

  /** The rectangle at a point, or -1. */
  at(x, y) {
    let found = -1;
    this.visit([x, x, y, y].map((value, place) => (place % 2 ? value + 1e-9 : value)), (first, last) => {
      for (let i = first; i < last; i += 1) {
        if (this.from[i] <= x && x < this.to[i] && this.low[i] <= y && y < this.high[i]) found = i;
      }
    });
    return found;
  }

  /** The end of the nearest rectangle below a point and the beginning of the nearest above it. */
  around(x, y) {
    let [below, above] = [-Infinity, Infinity];
    this.visit([x, x + 1e-9, -Infinity, Infinity], (first, last) => {
      for (let i = first; i < last; i += 1) {
        if (this.from[i] > x || x >= this.to[i]) continue;
        if (this.high[i] <= y) below = Math.max(below, this.high[i]);
        if (this.low[i] > y) above = Math.min(above, this.low[i]);
      }
    });
    return [below, above];
  }
}

/**
 * Adds the covered part of each pixel: one number a pixel, or with `colours` four: the part, and the part of each channel.
 * Rectangles of more than four pixels either way are noted in `edges`.
 */
function cover(sums, width, height, rectangles, view, colours, palette, edges) {
  const left = view[0];
  const top = view[3];
  const sx = width / (view[1] - left);
  const sy = height / (top - view[2]);
  const depth = colours ? 4 : 1;
  const { from, to, low, high, place } = rectangles;
  rectangles.visit(view, (first, last) => {
    for (let i = first; i < last; i += 1) {
      const x0 = Math.max(0, (from[i] - left) * sx);
      const x1 = Math.min(width, (to[i] - left) * sx);
      const y0 = Math.max(0, (top - high[i]) * sy);
      const y1 = Math.min(height, (top - low[i]) * sy);
      if (x0 >= x1 || y0 >= y1) continue;
      const colour = colours ? colours[place[i]] * 3 : 0;
      const r = colours ? palette[colour] : 0;
      const g = colours ? palette[colour + 1] : 0;
      const b = colours ? palette[colour + 2] : 0;
      const ix0 = x0 | 0;
      const ix1 = Math.min(width - 1, x1 | 0);
      const iy1 = Math.min(height - 1, y1 | 0);
      for (let iy = y0 | 0; iy <= iy1; iy += 1) {
        const tall = Math.min(y1, iy + 1) - Math.max(y0, iy);
        let at = (iy * width + ix0) * depth;
        for (let ix = ix0; ix <= ix1; ix += 1) {
          const part = tall * (Math.min(x1, ix + 1) - Math.max(x0, ix));
          sums[at] += part;
          if (depth === 4) {
            sums[at + 1] += part * r;
            sums[at + 2] += part * g;
            sums[at + 3] += part * b;
          }
          at += depth;
        }
      }
      if (edges && x1 - x0 > 4 && y1 - y0 > 4) edges.push(x0, x1, y0, y1);
    }
  });
}

/** Left, right, top and bottom of a rectangle in pixels, within the picture. */
function pixelBounds({ from, to, low, high }, i, view, width, height) {
  const [sx, sy] = [width / (view[1] - view[0]), height / (view[3] - view[2])];
  const within = (value, most) => Math.min(most, Math.max(0, value));
  return [within((from[i] - view[0]) * sx, width), within((to[i] - view[0]) * sx, width), within((view[3] - high[i]) * sy, height), within((view[3] - low[i]) * sy, height)];
}

/** The means of the cells of `grid` that each pixel covers. `view` is in cells: left, right, top, bottom. */
function resample(sums, width, height, grid, colours, [left, right, top, bottom]) {
  const sx = (right - left) / width;
  const sy = (bottom - top) / height;
  const depth = colours ? 4 : 1;
  for (let iy = 0; iy < height; iy += 1) {
    const y0 = top + iy * sy;
    const y1 = Math.min(GRID.height, y0 + sy);
    for (let ix = 0; ix < width; ix += 1) {
      const x0 = left + ix * sx;
      const x1 = Math.min(GRID.width, x0 + sx);
      let [part, r, g, b] = [0, 0, 0, 0];
      for (let gy = y0 | 0; gy < y1; gy += 1) {
        const tall = Math.min(y1, gy + 1) - Math.max(y0, gy);
        let cell = (gy * GRID.width + (x0 | 0)) * depth;
        for (let gx = x0 | 0; gx < x1; gx += 1) {
          const weight = tall * (Math.min(x1, gx + 1) - Math.max(x0, gx));
          part += weight * grid[cell];
          if (colours) {
            r += weight * grid[cell + 1];
            g += weight * grid[cell + 2];
            b += weight * grid[cell + 3];
          }
          cell += depth;
        }
      }
      const at = (iy * width + ix) * depth;
      const scale = 1 / (sx * sy);
      sums[at] = part * scale;
      if (colours) {
        sums[at + 1] = r * scale;
        sums[at + 2] = g * scale;
        sums[at + 3] = b * scale;
      }
    }
  }
}

/** What pixels are computed from: rectangles, their colours, and for many rectangles a finer picture of all of them. */
class AddressScene {
  constructor(blocks, segments, end, height, colours, palette, shades) {
    Object.assign(this, { blocks, segments, end, height, colours, palette });
    this.shade(shades);
    if (blocks.length + segments.length < MANY_RECTANGLES) return;
    const all = [0, end, 0, height];
    this.used = new Float32Array(GRID.width * GRID.height * 4);
    this.reserved = new Float32Array(GRID.width * GRID.height);
    cover(this.used, GRID.width, GRID.height, blocks, all, colours, palette);
    cover(this.reserved, GRID.width, GRID.height, segments, all);
    this.large = blocks.only((from, to, low, high) => to - from > end / 500 && high - low > height / 200);
  }

  /**
   * What is not drawn one by one, as parts of what looks free or unreserved otherwise, for each cell of the grid. So the
   * mean of every cell is right.
   */
  shade([small, reserved]) {
    if (!small && !reserved) return;
    const { columns, rows } = SHADE;
    const all = [0, this.end, 0, this.height];
    const [used, taken] = [new Float32Array(columns * rows), new Float32Array(columns * rows)];
    cover(used, columns, rows, this.blocks, all);
    cover(taken, columns, rows, this.segments, all);
    this.small = new Float32Array(columns * rows);
    this.unseen = new Float32Array(columns * rows);
    for (let row = 0; row < rows; row += 1) {
      for (let column = 0; column < columns; column += 1) {
        // Pixels begin at the top.
        const [from, to] = [row * columns + column, (rows - 1 - row) * columns + column];
        const extra = reserved ? reserved[from] / 100 : 0;
        this.unseen[to] = Math.min(1, extra / Math.max(1e-6, 1 - taken[to]));
        const free = Math.min(1, taken[to] + extra) - used[to];
        this.small[to] = small && small[from] ? Math.min(1, small[from] / 100 / Math.max(1e-6, free)) : 0;
      }
    }
  }

  /** The cell of the grid at a point. */
  cellAt(x, y) {
    const within = (share, most) => Math.min(most - 1, Math.max(0, Math.floor(share * most)));
    return within((this.height - y) / this.height, SHADE.rows) * SHADE.columns + within(x / this.end, SHADE.columns);
  }

  /** The cells of the rows and columns of pixels. */
  cellsOf(view, width, height) {
    const at = (i, size, low, high) => low + ((i + 0.5) / size) * (high - low);
    return {
      rows: Int32Array.from({ length: height }, (_, i) => this.cellAt(0, at(i, height, view[3], view[2]))),
      columns: Int32Array.from({ length: width }, (_, i) => this.cellAt(at(i, width, view[0], view[1]), this.height)),
    };
  }

  /** Adds the covered parts of the pixels of a view; returns the bounds of large blocks. */
  cover(view, width, height, used, reserved) {
    const edges = [];
    const [sx, sy] = [GRID.width / this.end, GRID.height / this.height];
    if (this.used && ((view[1] - view[0]) * sx) / width >= 1 && ((view[3] - view[2]) * sy) / height >= 1) {
      const cells = [view[0] * sx, view[1] * sx, (this.height - view[3]) * sy, (this.height - view[2]) * sy];
      resample(used, width, height, this.used, true, cells);
      resample(reserved, width, height, this.reserved, false, cells);
      this.large.visit(view, (first, last) => {
        for (let i = first; i < last; i += 1) edges.push(...pixelBounds(this.large, i, view, width, height));
      });
    } else {
      cover(used, width, height, this.blocks, view, this.colours, this.palette, edges);
      cover(reserved, width, height, this.segments, view);
    }
    return edges;
  }
}

/** The picture of a view as pixels. */
function addressPixels(width, height, scene, view, { paper, hole, block }, buffers) {
  const size = width * height;
  if (!buffers.used || buffers.image.width !== width || buffers.image.height !== height) {
    buffers.used = new Float32Array(size * 4);
    buffers.reserved = new Float32Array(size);
    buffers.image = new ImageData(width, height);
  }
  const { used, reserved, image } = buffers;
  used.fill(0);
  reserved.fill(0);
  const edges = scene.cover(view, width, height, used, reserved);
  const pixels = image.data;
  const cells = scene.small && scene.cellsOf(view, width, height);
  for (let pixel = 0, at = 0; pixel < size; pixel += 1, at += 4) {
    // Views of the same memory at several addresses can cover more than all of a pixel.
    const taken = used[at];
    const scale = taken > 1 ? 1 / taken : 1;
    const inUse = taken > 1 ? 1 : taken;
    let all = Math.min(1, Math.max(reserved[pixel], inUse));
    let small = 0;
    if (cells) {
      const cell = cells.rows[(pixel / width) | 0] + cells.columns[pixel % width];
      all += scene.unseen[cell] * (1 - all);
      small = scene.small[cell] * (all - inUse);
    }
    const free = all - inUse - small;
    pixels[at] = used[at + 1] * scale + block[0] * small + hole[0] * free + paper[0] * (1 - all);
    pixels[at + 1] = used[at + 2] * scale + block[1] * small + hole[1] * free + paper[1] * (1 - all);
    pixels[at + 2] = used[at + 3] * scale + block[2] * small + hole[2] * free + paper[2] * (1 - all);
    pixels[at + 3] = 255;
  }
  // Hairlines at the beginning and the top of blocks that are large enough.
  const blend = (x, y) => {
    const at = (y * width + x) * 4;
    for (let channel = 0; channel < 3; channel += 1) pixels[at + channel] = (pixels[at + channel] + 2 * paper[channel]) / 3;
  };
  for (let i = 0; i < edges.length; i += 4) {
    const [x0, x1, y0, y1] = [edges[i] | 0, Math.min(width, edges[i + 1] | 0), edges[i + 2] | 0, Math.min(height, edges[i + 3] | 0)];
    for (let x = x0; x < x1; x += 1) blend(x, y0);
    for (let y = y0; y < y1; y += 1) blend(x0, y);
  }
  return image;
}

/** Round amounts of memory between two, about `wanted` of them. */
function amountsBetween(low, high, wanted) {
  const step = 2 ** Math.ceil(Math.log2(Math.max(1, (high - low) / wanted)));
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) found.push(tick);
  return found;
}

/** Draws lines and words into an SVG element or a canvas, so that the page and saved files look the same. */
function svgPen(parent) {
  return {
    line: (x1, y1, x2, y2, stroke, width = 1, dash = '') => svg('line', { x1, y1, x2, y2, stroke, 'stroke-width': width, ...(dash && { 'stroke-dasharray': dash }) }, parent),
    box: (x, y, width, height, fill, stroke = 'none') => svg('rect', { x, y, width, height, fill, stroke }, parent),
    text: (x, y, words, fill, anchor = 'start', bold = false, turned = false) => {
      const element = svg('text', { x, y, style: `fill: ${fill}`, 'text-anchor': anchor, 'font-size': 12, 'font-family': 'system-ui, sans-serif', ...(bold && { 'font-weight': 600 }), ...(turned && { transform: `rotate(-90 ${x} ${y})` }) }, parent);
      element.textContent = words;
      return element;
    },
  };
}

function canvasPen(context) {
  return {
    line: (x1, y1, x2, y2, stroke, width = 1, dash = '') => {
      context.strokeStyle = stroke;
      context.lineWidth = width;
      context.setLineDash(dash ? dash.split(' ').map(Number) : []);
      context.beginPath();
      context.moveTo(x1, y1);
      context.lineTo(x2, y2);
      context.stroke();
    },
    box: (x, y, width, height, fill, stroke = 'none') => {
      context.setLineDash([]);
      context.lineWidth = 1;
      if (fill !== 'none') { context.fillStyle = fill; context.fillRect(x, y, width, height); }
      if (stroke !== 'none') { context.strokeStyle = stroke; context.strokeRect(x, y, width, height); }
    },
    text: (x, y, words, fill, anchor = 'start', bold = false, turned = false) => {
      context.save();
      context.font = `${bold ? 600 : 400} 12px system-ui, sans-serif`;
      context.fillStyle = fill;
      context.textAlign = { start: 'left', middle: 'center', end: 'right' }[anchor];
      context.translate(x, y);
      if (turned) context.rotate(-Math.PI / 2);
      context.fillText(words, 0, 0);
      context.restore();
    },
  };
}

/** One case: its rectangles on both axes, and colours. */
class AddressCase {
  constructor(chart, data) {
    this.chart = chart;
    this.data = data;
    this.name = `${chart.title} · ${data.strategies[chart.strategy]}`;
    this.height = chart.ranges.reduce((sum, [, size]) => sum + size, 0) || 1;
    const over = (columns) => new Rectangles(columns, chart.events, chart.unit);
    this.byEvents = { blocks: over(chart.blocks), segments: over(chart.segments), end: Math.max(1, chart.events) };
    this.colours = new Map();
  }

  /** Rectangles over `events` or `time`. */
  over(axis) {
    if (axis === 'events') return this.byEvents;
    if (!this.byTime) {
      const time = (event) => this.timeOf(event);
      const { blocks, segments, end } = this.byEvents;
      this.byTime = { blocks: blocks.along(time), segments: segments.along(time), end: Math.max(1, time(end)) };
    }
    return this.byTime;
  }

  /** Microseconds at an event, by the nearest known points of the clock. */
  timeOf(event) {
    const [events, times] = this.chart.clock;
    if (events.length < 2) return event;
    const place = Math.min(placeOf(events, event), events.length - 2);
    const step = events[place + 1] - events[place];
    return times[place] + (step ? ((event - events[place]) / step) * (times[place + 1] - times[place]) : 0);
  }

  /** The grid of what is not drawn one by one. Over time, each column takes the one at its event. */
  shade(name, axis) {
    const { shade } = this.chart[name];
    if (!shade || axis === 'events') return shade;
    const { end } = this.over('time');
    const { columns, rows } = SHADE;
    const [events, times] = this.chart.clock;
    const eventAt = (time) => {
      const place = Math.min(placeOf(times, time), events.length - 2);
      const step = times[place + 1] - times[place];
      return events[place] + (step ? ((time - times[place]) / step) * (events[place + 1] - events[place]) : 0);
    };
    return Array.from({ length: columns * rows }, (_, cell) => {
      const event = events.length < 2 ? 0 : eventAt((((cell % columns) + 0.5) / columns) * end);
      const column = Math.min(columns - 1, Math.max(0, Math.floor((event / this.byEvents.end) * columns)));
      return shade[Math.floor(cell / columns) * columns + column];
    });
  }

  offers() {
    const { category, stream, site } = this.chart.blocks;
    return [['end', 'never freed', true], ['category', 'category', !!category], ['stream', 'stream', !!stream], ['site', 'call site', !!site], ['life', 'length of life', true]].filter((offer) => offer[2]);
  }

  /** For each block the place of its colour, and the legend: [tint, strength, words]. */
  coloured(by) {
    if (!this.colours.has(by)) this.colours.set(by, this.colour(by));
    return this.colours.get(by);
  }

  colour(by) {
    const { blocks } = this.chart;
    const places = new Uint8Array(blocks.born.length);
    const named = (column, name, tints) => {
      const weights = new Map();
      column.forEach((value, i) => weights.set(value, (weights.get(value) || 0) + blocks.size[i]));
      const known = [...weights].filter(([value]) => value !== null).sort((a, b) => b[1] - a[1]).slice(0, tints.length).map(([value]) => value);
      const place = new Map(known.map((value, at) => [value, at]));
      column.forEach((value, i) => { places[i] = place.get(value) ?? known.length; });
      const keys = known.map((value, at) => [tints[at], 0.5, name(value)]);
      if (known.length < weights.size) keys.push(['block', 1, 'other']);
      return { places, keys };
    };
    if (by === 'category') {
      const names = this.data.categories;
      blocks.category.forEach((value, i) => { places[i] = value; });
      const seen = new Set(blocks.category);
      return { places, keys: names.map((text, place) => [TINTS[place], place === UNKNOWN_CATEGORY ? 1 : 0.5, seen.has(place) ? text : null]) };
    }
    if (by === 'stream') return named(blocks.stream, (stream) => `stream ${stream}`, TINTS.slice(0, UNKNOWN_CATEGORY));
    if (by === 'site') return named(blocks.site, (site) => shortSite(this.chart.sites[site]), SITE_TINTS);
    if (by === 'life') {
      const most = Math.log2(2 + this.chart.events);
      blocks.life.forEach((life, i) => { places[i] = life === 0 ? AGES - 1 : Math.min(AGES - 1, Math.floor((AGES * Math.log2(1 + life)) / most)); });
      return { places, keys: [...Array(AGES).keys()].map((age) => ['c0', ageOpacity(age), age === 0 ? 'freed at once' : age === AGES - 1 ? 'long' : '']) };
    }
    blocks.life.forEach((life, i) => { places[i] = life === 0 ? 1 : 0; });
    return { places, keys: [['block', 1, 'freed later'], ['c0', 0.55, 'not freed by the end']] };
  }
}

/** The colours of the page, as numbers. */
function pageTints(host, keys) {
  const probe = html('span', {});
  host.append(probe);
  const read = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
  };
  const [paper, hole, block, ink, soft, line, asked] = ['paper', 'hole', 'block', 'ink', 'soft', 'line', 'asked'].map(read);
  const palette = new Float32Array(keys.length * 3);
  keys.forEach(([tint, strength], place) => {
    read(tint).forEach((value, channel) => { palette[place * 3 + channel] = value * strength + paper[channel] * (1 - strength); });
  });
  probe.remove();
  const css = (colour) => `rgb(${[...colour].map(Math.round).join(' ')})`;
  return { paper, hole, block, palette, css, ink: css(ink), soft: css(soft), line: css(line), asked: css(asked) };
}

class AddressPlot {
  constructor(host, charts, data) {
    Object.assign(this, { host, charts, data, cases: [], buffers: {} });
    this.canvas = html('canvas', { 'aria-hidden': 'true' });
    this.overlay = svg('svg', { class: 'plot address', tabindex: 0, role: 'application' });
    this.readout = html('div', { class: 'readout', role: 'status', 'aria-live': 'polite', hidden: '' });
    this.facts = html('p', { class: 'facts' });
    this.keys = html('div', { class: 'keys' });
    this.picker = html('select', { 'aria-label': 'Case' });
    charts.forEach((chart, place) => this.picker.append(html('option', { value: place }, `${chart.title} · ${data.strategies[chart.strategy]}`)));
    this.colours = html('select', { 'aria-label': 'Colour by' });
    this.axis = html('select', { 'aria-label': 'Horizontal axis' }, html('option', { value: 'events' }, 'events'), html('option', { value: 'time' }, 'time'));
    const button = (text, label, act) => {
      const made = html('button', { type: 'button', 'aria-label': label, title: label }, text);
      made.addEventListener('click', act);
      return made;
    };
    this.all = button('Show all', 'Show all', () => this.show(this.whole()));
    const buttons = [
      button('+', 'Zoom in', () => this.zoom(0.5)), button('−', 'Zoom out', () => this.zoom(2)), this.all,
      button('PNG', 'Save this picture as PNG', () => this.savePng()), button('SVG', 'Save this picture as SVG', () => this.saveSvg()),
    ];
    this.stage = html('div', { class: 'stage' }, this.canvas, this.overlay);
    host.append(
      html('div', { class: 'controls' }, html('label', {}, 'Case', this.picker), html('label', {}, 'Colour by', this.colours), html('label', {}, 'Over', this.axis), html('span', { class: 'group' }, ...buttons)),
      this.facts, this.stage, this.readout, this.keys,
    );
    this.listen();
    const stored = Number(pageState.get('addr') ?? NaN);
    const failed = charts.findIndex((chart) => chart.failed);
    this.axis.value = pageState.get('addr-x') === 'time' ? 'time' : 'events';
    this.open(charts[stored] ? stored : Math.max(0, failed), pageState.get('addr-view'));
    new ResizeObserver(() => this.draw()).observe(host);
    new MutationObserver(() => this.draw()).observe(document.documentElement, { attributeFilter: ['data-theme'] });
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.draw());
    this.printInLight();
  }

  /** Paper is white: pixels do not follow the colours of the page by themselves. */
  printInLight() {
    const root = document.documentElement;
    let theme;
    window.addEventListener('beforeprint', () => {
      theme = root.dataset.theme;
      root.dataset.theme = 'light';
      this.paint();
    });
    window.addEventListener('afterprint', () => {
      if (theme === undefined) delete root.dataset.theme;
      else root.dataset.theme = theme;
    });
  }

  open(place, view = null) {
    this.picker.value = place;
    this.cases[place] ??= new AddressCase(this.charts[place], this.data);
    this.case = this.cases[place];
    const offers = this.case.offers();
    const wanted = pageState.get('addr-colour') || this.colours.value;
    this.colours.replaceChildren(...offers.map(([value, text]) => html('option', { value }, text)));
    this.colours.value = offers.some(([value]) => value === wanted) ? wanted : offers[0][0];
    this.tell();
    const stored = (view || '').split('_').map(Number);
    this.show(stored.length === 4 && stored.every(Number.isFinite) ? stored : this.whole(), true);
  }

  /** What is drawn and what is not. */
  tell() {
    const { chart } = this.case;
    const { all, millionths } = chart.blocks_left_out;
    const drawn = chart.blocks.born.length;
    const part = (number) => `${Number((number / 10000).toPrecision(2))} %`;
    const words = [html('b', {}, plural(drawn, 'block', 'blocks')), drawn === all ? ' (all of them)' : ` of ${count(all)} are drawn one by one, the most visible. The others (${part(millionths)} of the memory in use × events) are drawn as their mean over small areas`];
    const missing = chart.blocks_left_out.missing_millionths;
    if (missing) words.push(`, but for ${part(missing)}, which looks free`);
    const segments = chart.segments_left_out;
    if (segments.millionths) words.push(`. ${count(chart.segments.born.length)} of ${plural(segments.all, 'segment', 'segments')} are drawn one by one, too`);
    const { failed } = chart;
    if (failed) words.push('. ', html('b', { class: 'oom' }, `Out of memory at event ${count(failed.event)}`), `: ${ofBytes(failed.requested)} requested, ${ofBytes(failed.cached_free)} free in the cache, ${ofBytes(failed.device_free)} not reserved${failed.limited ? ', up to the limit' : ''}`);
    words.push('. Drag to zoom, or scroll after a click; arrow keys move.');
    this.facts.replaceChildren(...words);
    this.headline();
    this.overlay.setAttribute('aria-label', `Addresses over time of ${this.case.name}: ${this.facts.textContent} Plus and minus zoom, arrow keys move, 0 shows all.`);
  }

  /** The headline of the section belongs to the case that is shown. */
  headline() {
    const heading = this.host.closest('section')?.querySelector('h2');
    if (!heading) return;
    const { failed, title, strategy } = this.case.chart;
    const name = html('code', {}, this.data.strategies[strategy]);
    heading.replaceChildren(...(failed
      ? [name, ` on ${title} ran out of memory: ${ofBytes(failed.requested)} requested, ${ofBytes(failed.cached_free)} free between its blocks`]
      : ['Where the blocks of ', name, ` on ${title} lay, and how long`]));
  }

  whole() {
    return [0, this.case.over(this.axis.value).end, 0, this.case.height];
  }

  /** Shows a part: from and to, lowest and highest address. */
  show(view, restoring = false) {
    const whole = this.whole();
    const clamp = (from, to, first, last) => {
      const width = Math.min(Math.max(to - from, (last - first) / 1e7), last - first);
      const start = Math.min(Math.max(from, first), last - width);
      return [start, start + width];
    };
    this.view = [...clamp(view[0], view[1], whole[0], whole[1]), ...clamp(view[2], view[3], whole[2], whole[3])];
    const isWhole = this.view.every((value, place) => value === whole[place]);
    this.all.disabled = isWhole;
    if (!restoring) pageState.set('addr-view', isWhole ? null : this.view.map((value) => Number(value.toPrecision(9))).join('_'));
    this.readout.hidden = true;
    this.draw();
  }

  zoom(factor, x = null, y = null, horizontally = true, vertically = true) {
    const [from, to, low, high] = this.view;
    const [cx, cy] = [x ?? (from + to) / 2, y ?? (low + high) / 2];
    const [fx, fy] = [horizontally ? factor : 1, vertically ? factor : 1];
    this.show([cx - (cx - from) * fx, cx + (to - cx) * fx, cy - (cy - low) * fy, cy + (high - cy) * fy]);
  }

  move(x, y) {
    const [from, to, low, high] = this.view;
    this.show([from + x * (to - from), to + x * (to - from), low + y * (high - low), high + y * (high - low)]);
  }

  /** Draws at the next frame, however often it was asked for. */
  draw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.paint();
    });
  }

  paint() {
    const began = performance.now();
    this.width = Math.max(280, this.host.clientWidth);
    this.tall = this.width < 500 ? 340 : 480;
    // A failed request needs room for two bars beside the picture and a line above it.
    const { failed } = this.case.chart;
    this.margin = { ...ADDRESS_MARGIN, ...(failed && { right: 60, top: 42 }) };
    this.inner = { width: Math.floor(this.width - this.margin.left - this.margin.right), height: this.tall - this.margin.top - this.margin.bottom };
    const { keys } = this.case.coloured(this.colours.value);
    this.tints = pageTints(this.host, keys);
    const density = this.case.byEvents.blocks.length > 200000 ? 1 : Math.min(2, window.devicePixelRatio || 1);
    const image = this.pixels(Math.round(this.inner.width * density), Math.round(this.inner.height * density));
    Object.assign(this.canvas, { width: image.width, height: image.height });
    this.canvas.getContext('2d').putImageData(image, 0, 0);
    Object.assign(this.canvas.style, { left: `${this.margin.left}px`, top: `${this.margin.top}px`, width: `${this.inner.width}px`, height: `${this.inner.height}px` });
    this.overlay.setAttribute('viewBox', `0 0 ${this.width} ${this.tall}`);
    this.overlay.style.height = `${this.tall}px`;
    this.overlay.replaceChildren();
    this.frame(svgPen(this.overlay));
    this.selection = svg('rect', { class: 'selection', visibility: 'hidden' }, this.overlay);
    this.legend(keys);
    this.canvas.dataset.frame = (performance.now() - began).toFixed(1);
  }

  /** The pixels of the view. Those of the whole picture are kept: with a million blocks they take longest. */
  pixels(width, height) {
    const scene = this.scene();
    const isWhole = this.all.disabled;
    if (isWhole && scene.whole?.width === width && scene.whole.height === height) return scene.whole;
    const image = addressPixels(width, height, scene, this.view, this.tints, isWhole ? {} : this.buffers);
    if (isWhole) scene.whole = image;
    return image;
  }

  /** Kept until the case, the axis or the colours change. */
  scene() {
    const key = [this.picker.value, this.axis.value, this.colours.value, ...this.tints.palette].join();
    if (this.sceneKey !== key) {
      const { blocks, segments, end } = this.case.over(this.axis.value);
      const { places } = this.case.coloured(this.colours.value);
      const shades = [this.case.shade('blocks', this.axis.value), this.case.shade('segments', this.axis.value)];
      this.kept = new AddressScene(blocks, segments, end, this.case.height, places, this.tints.palette, shades);
      this.sceneKey = key;
    }
    return this.kept;
  }

  x(value) {
    return this.margin.left + ((value - this.view[0]) / (this.view[1] - this.view[0])) * this.inner.width;
  }

  y(value) {
    return this.margin.top + ((this.view[3] - value) / (this.view[3] - this.view[2])) * this.inner.height;
  }

  /** Axes, steps, and the failed request. */
  frame(pen) {
    const { soft, line } = this.tints;
    const { left, top } = this.margin;
    const [right, floor] = [left + this.inner.width, top + this.inner.height];
    const narrow = this.width < 500;
    for (const tick of amountsBetween(this.view[2], this.view[3], 6)) {
      const y = this.y(tick);
      pen.line(left - 5, y, left, y, line);
      pen.text(left - 8, y + 4, ofBytes(tick), soft, 'end');
    }
    const axis = this.axis.value;
    for (const tick of ticks(this.view[0], this.view[1], narrow ? 3 : 7)) {
      const x = this.x(tick);
      pen.line(x, floor, x, floor + 5, line);
      pen.text(x, floor + 19, axis === 'time' ? duration(tick) : count(tick), soft, x > right - 30 ? 'end' : 'middle');
    }
    pen.box(left, top, this.inner.width, this.inner.height, 'none', line);
    pen.text((left + right) / 2, floor + 37, axis === 'time' ? 'time on the device’s clock' : 'event', soft, 'middle');
    pen.text(12, (top + floor) / 2, narrow ? 'address, without gaps' : 'address, without the gaps between segments', soft, 'middle', false, true);
    if (axis === 'events') this.steps(pen, floor, right);
    if (this.case.chart.failed) this.failure(pen, floor, right);
  }

  steps(pen, floor, right) {
    const inside = this.case.chart.steps.filter(([event]) => event >= this.view[0] && event <= this.view[1]);
    if (inside.length > 40) return;
    const every = Math.ceil(inside.length / (this.inner.width / 90)) || 1;
    inside.forEach(([event, step], place) => {
      const x = this.x(event);
      pen.line(x, this.margin.top - 6, x, this.margin.top, this.tints.soft);
      if (place % every === 0 && x < right - 50) pen.text(x + 3, this.margin.top - 8, `step ${step}`, this.tints.soft);
    });
  }

  /** A line where the request failed; beside the picture the request and the largest hole, to the scale of the addresses. */
  failure(pen, floor, right) {
    const { failed } = this.case.chart;
    const { asked, soft, css, hole } = this.tints;
    const at = this.axis.value === 'time' ? this.case.timeOf(failed.event) : failed.event;
    const x = Math.min(this.x(at), right);
    const top = this.margin.top;
    if (at >= this.view[0] && at <= this.view[1]) {
      pen.line(x, top - 22, x, floor, asked, 2);
      pen.text(x > this.width / 2 ? x - 6 : x + 6, top - 26, `out of memory: ${ofBytes(failed.requested)} requested`, asked, x > this.width / 2 ? 'end' : 'start', true);
    }
    const scale = this.inner.height / (this.view[3] - this.view[2]);
    const bar = (place, amount, fill, stroke, words) => {
      const height = Math.min(this.inner.height, Math.max(1, amount * scale));
      const x0 = right + 8 + place * 25;
      pen.box(x0, floor - height, 9, height, fill, stroke);
      // A bar that is cut off has an open end.
      if (amount * scale > this.inner.height) pen.line(x0 - 2, top, x0 + 11, top + 5, stroke, 2);
      pen.text(x0 + 20, floor - 2, words, stroke === 'none' ? soft : stroke, 'start', false, true);
    };
    bar(0, failed.requested, 'none', asked, `requested ${ofBytes(failed.requested)}`);
    bar(1, failed.largest_free ?? 0, css(hole), 'none', failed.largest_free === null ? 'largest hole unknown' : `largest hole ${ofBytes(failed.largest_free)}`);
  }

  legend(keys) {
    this.keys.replaceChildren();
    const add = (colour, text) => this.keys.append(html('span', { class: 'key' }, html('span', { class: 'swatch', style: `background: ${colour}` }), text));
    keys.forEach(([, , text], place) => text !== null && add(this.tints.css(this.tints.palette.slice(place * 3, place * 3 + 3)), text));
    add(this.tints.css(this.tints.hole), 'reserved and free');
  }

  /** What lies at a point of the picture, in lines. */
  read(x, y) {
    const { blocks, segments } = this.case.over(this.axis.value);
    const { chart } = this.case;
    const found = blocks.at(x, y);
    if (found >= 0) {
      const place = blocks.place[found];
      const [from, to] = [this.case.byEvents.blocks.from[found], this.case.byEvents.blocks.to[found]];
      const { category, stream, site, life, size } = chart.blocks;
      const lines = [`${ofBytes(size[place] * chart.unit)}${category ? `, ${this.data.categories[category[place]]}` : ''}`];
      if (site && site[place] !== null) lines.push(chart.sites[site[place]]);
      lines.push(`requested at event ${count(from)}, ${life[place] === 0 ? 'not freed by the end' : `reusable after event ${count(to)}`}`);
      const lasted = this.case.timeOf(to) - this.case.timeOf(from);
      lines.push(`${plural(to - from, 'event', 'events')} long${chart.clock[0].length > 1 ? `, about ${duration(lasted)}` : ''}`);
      lines.push(`${this.addressOf(blocks.low[found])}${stream ? `, stream ${stream[place]}` : ''}`);
      return lines;
    }
    const segment = segments.at(x, y);
    const scene = this.scene();
    const small = scene.small ? Math.round(scene.small[scene.cellAt(x, y)] * 100) : 0;
    const mean = small ? [`small blocks, not drawn one by one, take about ${small} % of what is free around here`] : [];
    if (segment < 0) return mean.length ? mean : ['not reserved at that moment'];
    const [below, above] = blocks.around(x, y);
    const [low, high] = [Math.max(below, segments.low[segment]), Math.min(above, segments.high[segment])];
    return [`hole of ${ofBytes(high - low)}${small ? ' between the blocks drawn' : ''}`, ...mean, `in ${ofBytes(segments.high[segment] - segments.low[segment])} from the device`, this.addressOf(low)];
  }

  /** The device's address of an offset. */
  addressOf(offset) {
    let before = 0;
    for (const [address, size] of this.case.chart.ranges) {
      if (offset < before + size) return `address 0x${(address + offset - before).toString(16)}`;
      before += size;
    }
    return '';
  }

  point(event) {
    const box = this.overlay.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    const inside = px >= this.margin.left && px < this.margin.left + this.inner.width && py >= this.margin.top && py < this.margin.top + this.inner.height;
    this.readout.hidden = !inside;
    if (!inside) return;
    const lines = this.read(...this.valueAt(px, py));
    this.readout.replaceChildren(...lines.flatMap((line, place) => (place ? [html('br'), line] : [html('strong', {}, line)])));
    const frame = this.host.getBoundingClientRect();
    this.readout.style.left = `${Math.max(0, Math.min(px + 14, this.width - this.readout.offsetWidth))}px`;
    this.readout.style.top = `${event.clientY - frame.top + 18}px`;
  }

  valueAt(px, py) {
    return [
      this.view[0] + ((px - this.margin.left) / this.inner.width) * (this.view[1] - this.view[0]),
      this.view[3] - ((py - this.margin.top) / this.inner.height) * (this.view[3] - this.view[2]),
    ];
  }

  /** The part between two points; a flat drag keeps all addresses, a steep one all events. */
  dragged([x0, y0], [x1, y1]) {
    const [left, right] = [x0, x1].sort((a, b) => a - b);
    const [top, bottom] = [y0, y1].sort((a, b) => a - b);
    const [from, high] = this.valueAt(left, top);
    const [to, low] = this.valueAt(right, bottom);
    const [flat, steep] = [bottom - top < 14, right - left < 14];
    if (flat && steep) return null;
    return [steep ? this.view[0] : from, steep ? this.view[1] : to, flat ? this.view[2] : low, flat ? this.view[3] : high];
  }

  listen() {
    const spot = (event) => {
      const box = this.overlay.getBoundingClientRect();
      const { left, top } = this.margin;
      return [Math.min(Math.max(event.clientX - box.left, left), left + this.inner.width), Math.min(Math.max(event.clientY - box.top, top), top + this.inner.height)];
    };
    let start = null;
    this.overlay.addEventListener('pointerdown', (event) => {
      if (event.button === 0) start = spot(event);
    });
    this.overlay.addEventListener('pointermove', (event) => {
      this.point(event);
      if (!start) return;
      const part = this.dragged(start, spot(event));
      this.selection.setAttribute('visibility', part ? 'visible' : 'hidden');
      if (!part) return;
      const [x, y] = [this.x(part[0]), this.y(part[3])];
      Object.entries({ x, y, width: this.x(part[1]) - x, height: this.y(part[2]) - y }).forEach(([name, value]) => this.selection.setAttribute(name, value));
    });
    window.addEventListener('pointerup', (event) => {
      if (!start) return;
      const part = this.dragged(start, spot(event));
      start = null;
      this.selection.setAttribute('visibility', 'hidden');
      if (part) this.show(part);
    });
    this.overlay.addEventListener('pointerleave', () => { this.readout.hidden = true; });
    this.overlay.addEventListener('dblclick', () => this.show(this.whole()));
    // The wheel scrolls the page unless this picture has the focus.
    this.overlay.addEventListener('wheel', (event) => {
      if (!event.ctrlKey && !event.metaKey && document.activeElement !== this.overlay) return;
      event.preventDefault();
      this.zoom((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, ...this.valueAt(...spot(event)), !event.altKey, !event.shiftKey);
    }, { passive: false });
    this.overlay.addEventListener('keydown', (event) => {
      const actions = {
        ArrowLeft: () => this.move(-0.2, 0), ArrowRight: () => this.move(0.2, 0), ArrowUp: () => this.move(0, 0.2), ArrowDown: () => this.move(0, -0.2),
        '+': () => this.zoom(0.5), '=': () => this.zoom(0.5), '-': () => this.zoom(2), 0: () => this.show(this.whole()),
      };
      if (!actions[event.key]) return;
      event.preventDefault();
      actions[event.key]();
    });
    this.picker.addEventListener('change', () => {
      pageState.set('addr', this.picker.value);
      pageState.set('addr-view', null);
      this.open(Number(this.picker.value));
    });
    this.colours.addEventListener('change', () => {
      pageState.set('addr-colour', this.colours.value);
      this.draw();
    });
    this.axis.addEventListener('change', () => {
      pageState.set('addr-x', this.axis.value === 'time' ? 'time' : null);
      this.show(this.whole());
    });
  }

  /** Below the picture in saved files: what it shows. */
  caption(pen, y) {
    let x = this.margin.left;
    const { keys } = this.case.coloured(this.colours.value);
    const entries = keys.map(([, , text], place) => [this.tints.palette.slice(place * 3, place * 3 + 3), text]).concat([[this.tints.hole, 'reserved and free']]);
    for (const [colour, text] of entries) {
      if (!text) continue;
      const wide = 24 + text.length * 6.6;
      if (x + wide > this.width && x > this.margin.left) { x = this.margin.left; y += 18; }
      pen.box(x, y - 9, 10, 10, this.tints.css(colour));
      pen.text(x + 15, y, text, this.tints.soft);
      x += wide;
    }
    const most = Math.max(30, Math.floor((this.width - this.margin.left) / 6.6));
    let line = '';
    for (const word of this.facts.textContent.split(' Drag to zoom')[0].split(' ')) {
      if (line.length + word.length > most) {
        y += 18;
        pen.text(this.margin.left, y, line, this.tints.soft);
        line = '';
      }
      line += `${line && ' '}${word}`;
    }
    pen.text(this.margin.left, y + 18, line, this.tints.soft);
    return y + 28;
  }

  fileName(ending) {
    return `addresses ${this.case.name}.${ending}`.replace(/[^\w.-]+/g, '-');
  }

  save(blob, ending) {
    const link = html('a', { href: URL.createObjectURL(blob), download: this.fileName(ending) });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  /** The height of a saved picture: with a title above and a caption below. */
  savedHeight() {
    return this.tall + 28 + this.caption({ box: () => {}, text: () => {} }, 0) + 10;
  }

  savePng() {
    const density = 2;
    const canvas = html('canvas', { width: this.width * density, height: this.savedHeight() * density });
    const context = canvas.getContext('2d');
    context.scale(density, density);
    context.fillStyle = this.tints.css(this.tints.paper);
    context.fillRect(0, 0, this.width, this.savedHeight());
    const pen = canvasPen(context);
    pen.text(this.margin.left, 20, this.case.name, this.tints.ink, 'start', true);
    context.translate(0, 28);
    const image = addressPixels(this.inner.width * density, this.inner.height * density, this.scene(), this.view, this.tints, {});
    const layer = html('canvas', { width: image.width, height: image.height });
    layer.getContext('2d').putImageData(image, 0, 0);
    context.drawImage(layer, this.margin.left, this.margin.top, this.inner.width, this.inner.height);
    this.frame(pen);
    this.caption(pen, this.tall + 10);
    canvas.toBlob((blob) => this.save(blob, 'png'), 'image/png');
  }

  saveSvg() {
    const [width, height] = [this.width, this.savedHeight()];
    const root = svg('svg', { xmlns: SVG, viewBox: `0 0 ${width} ${height}`, width, height, role: 'img' });
    svg('title', {}, root).textContent = `Addresses over time: ${this.case.name}`;
    const pen = svgPen(root);
    pen.box(0, 0, width, height, this.tints.css(this.tints.paper));
    pen.text(this.margin.left, 20, this.case.name, this.tints.ink, 'start', true);
    const body = svg('g', { transform: 'translate(0 28)' }, root);
    this.shapes(body);
    this.frame(svgPen(body));
    this.caption(svgPen(body), this.tall + 10);
    this.save(new Blob([new XMLSerializer().serializeToString(root)], { type: 'image/svg+xml' }), 'svg');
  }

  /** The cells of the grid of what is not drawn one by one, as far as they are visible. */
  cells(parent, colour, parts) {
    const { end } = this.case.over(this.axis.value);
    parts?.forEach((part, cell) => {
      const [row, column] = [Math.floor(cell / SHADE.columns), cell % SHADE.columns];
      const [from, to] = [column, column + 1].map((place) => Math.min(this.view[1], Math.max(this.view[0], (place / SHADE.columns) * end)));
      const [high, low] = [row, row + 1].map((place) => Math.min(this.view[3], Math.max(this.view[2], (1 - place / SHADE.rows) * this.case.height)));
      if (part < 0.005 || from >= to || low >= high) return;
      svg('rect', { x: this.x(from).toFixed(2), y: this.y(high).toFixed(2), width: (this.x(to) - this.x(from)).toFixed(2), height: (this.y(low) - this.y(high)).toFixed(2), fill: this.tints.css(colour), 'fill-opacity': part.toFixed(2) }, parent);
    });
  }

  /** The visible rectangles as shapes, one path for each colour; as an image if they are too many for a file. */
  shapes(parent) {
    const { blocks, segments } = this.case.over(this.axis.value);
    const { places, keys } = this.case.coloured(this.colours.value);
    const { left, top } = this.margin;
    const paths = keys.map(() => ({ large: [], small: [] }));
    let free = '';
    let shown = 0;
    const cut = (list, i) => {
      const [x0, x1] = [Math.max(this.view[0], list.from[i]), Math.min(this.view[1], list.to[i])];
      const [low, high] = [Math.max(this.view[2], list.low[i]), Math.min(this.view[3], list.high[i])];
      if (x0 >= x1 || low >= high) return '';
      const [x, y] = [this.x(x0), this.y(high)];
      return `M${x.toFixed(2)} ${y.toFixed(2)}h${(this.x(x1) - x).toFixed(3)}v${(this.y(low) - y).toFixed(3)}h${(x - this.x(x1)).toFixed(3)}z`;
    };
    const each = (list, act) => list.visit(this.view, (first, last) => {
      for (let i = first; i < last; i += 1) act(cut(list, i), i);
    });
    each(blocks, (path) => { shown += path ? 1 : 0; });
    each(segments, (path) => { shown += path ? 1 : 0; });
    if (shown > MOST_SHAPES) {
      svg('desc', {}, parent).textContent = `${count(shown)} rectangles are visible: they are an image here. A smaller part of the picture is saved as shapes.`;
      const [width, height] = [this.inner.width, this.inner.height];
      const layer = html('canvas', { width: width * 2, height: height * 2 });
      layer.getContext('2d').putImageData(addressPixels(width * 2, height * 2, this.scene(), this.view, this.tints, {}), 0, 0);
      svg('image', { x: left, y: top, width, height, href: layer.toDataURL('image/png') }, parent);
      return;
    }
    each(segments, (path) => { free += path; });
    each(blocks, (path, i) => {
      const [x0, x1, y0, y1] = pixelBounds(blocks, i, this.view, this.inner.width, this.inner.height);
      if (path) paths[places[blocks.place[i]]][x1 - x0 > 4 && y1 - y0 > 4 ? 'large' : 'small'].push(path);
    });
    const { unseen, small } = this.scene();
    this.cells(parent, this.tints.hole, unseen);
    svg('path', { d: free, fill: this.tints.css(this.tints.hole) }, parent);
    // Means lie on what is reserved; where not all segments are drawn, that is not known to the pixel.
    const isKnown = small && !unseen.some((part) => part > 0);
    if (isKnown) svg('path', { d: free }, svg('clipPath', { id: 'reserved' }, parent));
    this.cells(svg('g', isKnown ? { 'clip-path': 'url(#reserved)' } : {}, parent), this.tints.block, small);
    const paper = this.tints.css(this.tints.paper);
    paths.forEach(({ large, small: thin }, place) => {
      const fill = this.tints.css(this.tints.palette.slice(place * 3, place * 3 + 3));
      if (thin.length) svg('path', { d: thin.join(''), fill }, parent);
      if (large.length) svg('path', { d: large.join(''), fill, stroke: paper, 'stroke-width': 0.5 }, parent);
    });
  }
}

function drawAddresses(host, charts, data) {
  return new AddressPlot(host, charts, data);
}

