// Elements.

const SVG = 'http://www.w3.org/2000/svg';

function svg(name, attributes = {}, parent = null) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (parent) parent.append(element);
  return element;
}

function html(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** A group of buttons, one of them pressed. */
function segmented(label, choices, chosen, choose) {
  const group = html('div', { class: 'segmented', role: 'group', 'aria-label': label });
  for (const [value, text] of choices) {
    const button = html('button', { type: 'button', 'aria-pressed': String(value === chosen), 'data-choice': value }, text);
    button.addEventListener('click', () => {
      for (const other of group.children) other.setAttribute('aria-pressed', String(other === button));
      choose(value);
    });
    group.append(button);
  }
  return html('div', { class: 'group' }, label, group);
}

/** From the ninth strategy on, colours repeat with a dash. */
const DASHES = ['', '7 3', '2 3', '9 3 2 3'];

function dashOf(strategy) {
  return DASHES[Math.floor(strategy / 8) % DASHES.length];
}

function lineSample(strategy) {
  const sample = svg('svg', { viewBox: '0 0 26 10', class: `c${strategy % 8}`, 'aria-hidden': 'true' });
  svg('line', { x1: 1, x2: 25, y1: 5, y2: 5, stroke: 'currentColor', 'stroke-width': 3, 'stroke-dasharray': dashOf(strategy) }, sample);
  return sample;
}

/** The legend entry of a mark. */
function key(draw, text) {
  const sample = svg('svg', { viewBox: '0 0 26 10', class: 'plot', 'aria-hidden': 'true' });
  sample.style.width = '1.6rem';
  draw(sample);
  return html('span', { class: 'key' }, sample, text);
}

