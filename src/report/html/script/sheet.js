// A picture of fixed size: no zoom, one tab stop, marks that are read with the mouse or the arrow keys.

class Sheet {
  /**
   * `options.label`: the accessible name. `options.draw(sheet)` draws into `sheet.root` for `sheet.width`, calls `sheet.mark` for
   * everything that can be read, and returns the height. It is called again when the width of the host changes.
   */
  constructor(host, options) {
    this.host = host;
    this.options = options;
    this.marks = [];
    this.root = svg('svg', { class: 'plot sheet', tabindex: 0, role: 'application', 'aria-label': options.label });
    this.readout = html('div', { class: 'readout', role: 'status', 'aria-live': 'polite', hidden: '' });
    host.append(this.root, this.readout);
    this.listen();
    new ResizeObserver(() => this.draw()).observe(host);
    this.draw();
  }

  draw() {
    const width = Math.max(280, this.host.clientWidth);
    if (width === this.width) return;
    this.width = width;
    this.marks = [];
    this.root.replaceChildren();
    const height = this.options.draw(this);
    this.root.setAttribute('viewBox', `0 0 ${width} ${height}`);
    this.root.style.height = `${height}px`;
    this.host.style.minHeight = `${height}px`;
    this.ring = svg('circle', { class: 'ring', r: 7, visibility: 'hidden' }, this.root);
    this.read(undefined);
  }

  /** Something at (x, y) with a title, rows of [name, value] and, where it is about a case, the id of the case. */
  mark(x, y, title, rows, caseId = null) {
    this.marks.push({ x, y, title, rows, caseId });
  }

  /** Shows what is known of a mark. */
  read(mark) {
    this.current = mark;
    this.readout.hidden = !mark;
    this.ring?.setAttribute('visibility', mark ? 'visible' : 'hidden');
    this.root.style.cursor = mark?.caseId ? 'pointer' : '';
    if (!mark) return;
    this.ring.setAttribute('cx', mark.x);
    this.ring.setAttribute('cy', mark.y);
    const body = html('table', { role: 'presentation' });
    for (const [name, value] of mark.rows) body.append(html('tr', {}, html('td', {}, name), html('td', { class: 'number' }, value)));
    this.readout.replaceChildren(html('strong', {}, mark.title), body);
    if (mark.caseId) this.readout.append(html('small', {}, 'Click or Enter: the row of this case'));
    const scale = this.root.getBoundingClientRect().width / this.width || 1;
    const x = mark.x * scale;
    const room = this.host.clientWidth - this.readout.offsetWidth;
    const beside = x + 14 > room ? x - 14 - this.readout.offsetWidth : x + 14;
    this.readout.style.left = `${Math.min(Math.max(0, beside), Math.max(0, room))}px`;
    this.readout.style.top = `${this.root.offsetTop + mark.y + 12}px`;
  }

  nearest(x, y, most) {
    let best;
    let least = most * most;
    for (const mark of this.marks) {
      // The row matters more than the place in it.
      const distance = (mark.x - x) ** 2 + (2 * (mark.y - y)) ** 2;
      if (distance < least) [best, least] = [mark, distance];
    }
    return best;
  }

  listen() {
    const place = (event) => {
      const box = this.root.getBoundingClientRect();
      const scale = box.width / this.width || 1;
      return [(event.clientX - box.left) / scale, (event.clientY - box.top) / scale];
    };
    this.root.addEventListener('pointermove', (event) => this.read(this.nearest(...place(event), 30)));
    this.root.addEventListener('pointerleave', () => this.read(undefined));
    this.root.addEventListener('click', (event) => {
      const mark = this.nearest(...place(event), 30);
      if (mark?.caseId) goToCase(mark.caseId);
    });
    this.root.addEventListener('blur', () => this.read(undefined));
    this.root.addEventListener('keydown', (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === 'Enter' && this.current?.caseId) {
        event.preventDefault();
        goToCase(this.current.caseId);
      } else if (event.key === 'Escape') {
        this.read(undefined);
      } else if (step && this.marks.length > 0) {
        event.preventDefault();
        const vertical = event.key === 'ArrowDown' || event.key === 'ArrowUp';
        this.read(vertical && this.current ? this.nextRow(step) : this.nextInOrder(step));
      }
    });
  }

  /** The next mark of the same row from left to right, then the next row. */
  nextInOrder(step) {
    const ordered = [...this.marks].sort((a, b) => a.y - b.y || a.x - b.x);
    const now = this.current ? ordered.indexOf(this.current) + step : 0;
    return ordered[Math.min(Math.max(now, 0), ordered.length - 1)];
  }

  /** The mark of the next row whose x is nearest. */
  nextRow(step) {
    const beyond = this.marks.filter((mark) => (mark.y - this.current.y) * step > 9);
    if (beyond.length === 0) return this.current;
    const row = beyond.reduce((least, mark) => ((mark.y - least) * step < 0 ? mark.y : least), beyond[0].y);
    const there = beyond.filter((mark) => Math.abs(mark.y - row) < 9);
    return there.reduce((best, mark) => (Math.abs(mark.x - this.current.x) < Math.abs(best.x - this.current.x) ? mark : best));
  }
}

/** Scrolls to the row of a case and marks it. */
function goToCase(caseId) {
  pageState.set('case', caseId);
  const row = document.querySelector(`tr[data-case="${CSS.escape(caseId)}"]`);
  const target = row || document.getElementById('memory');
  if (!target) return;
  for (let fold = target.closest('details'); fold; fold = fold.parentElement.closest('details')) fold.open = true;
  document.querySelectorAll('tr.sought').forEach((other) => other.classList.remove('sought'));
  row?.classList.add('sought');
  target.scrollIntoView({ block: 'center' });
}

/** The width of a text in a picture, in pixels. */
const textWidth = (() => {
  const context = document.createElement('canvas').getContext('2d');
  return (text, font = '12px system-ui, sans-serif') => {
    context.font = font;
    return context.measureText(text).width;
  };
})();

/** A text that fits into `room` pixels: its end is left out where it does not. */
function fitted(text, room, font) {
  if (textWidth(text, font) <= room) return text;
  let kept = text.length;
  while (kept > 1 && textWidth(`${text.slice(0, kept)}…`, font) > room) kept -= 1;
  return `${text.slice(0, kept)}…`;
}

