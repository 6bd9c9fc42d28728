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

/**
 * One tab stop for a group of controls: the arrow keys, Home and End move between them. Controls that are added later join
 * the group. A slider keeps its own tab stop, because it needs the arrow keys.
 */
function rove(group) {
  group.dataset.group = 'true';
  const members = () => [...group.querySelectorAll('button, select, a')].filter((one) => !one.hidden && !one.disabled);
  const choose = (chosen) => members().forEach((one) => { one.tabIndex = one === chosen ? 0 : -1; });
  const settle = () => {
    const all = members();
    if (all.filter((one) => one.tabIndex === 0).length !== 1) choose(all.find((one) => one === document.activeElement) || all[0]);
  };
  group.addEventListener('focusin', (event) => {
    if (members().includes(event.target)) choose(event.target);
  });
  group.addEventListener('keydown', (event) => {
    const all = members();
    const place = all.indexOf(event.target);
    const next = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: all.length - 1 }[event.key];
    if (place < 0 || next === undefined) return;
    event.preventDefault();
    all[(next + all.length) % all.length].focus();
  });
  new MutationObserver(settle).observe(group, { childList: true, subtree: true, attributeFilter: ['hidden', 'disabled'] });
  settle();
}

// How strategies are drawn. The page names colour, dash and marker of each (`StrategyLook` in element.rs), so a strategy looks
// the same everywhere. More strategies than colours are told apart by dash and marker.

const DASHES = ['', '7 3', '2 3', '9 3 2 3'];
/** Outlines around (0, 0), at most 4 from it; `.m0` to `.m7` in page.css are the same. */
const MARKERS = [
  'M-4 0A4 4 0 1 0 4 0A4 4 0 1 0 -4 0Z',
  'M-3.5 -3.5H3.5V3.5H-3.5Z',
  'M0 -4L4 3.5H-4Z',
  'M0 -4.5L4.5 0L0 4.5L-4.5 0Z',
  'M0 4L4 -3.5H-4Z',
  'M-1.5 -4H1.5V-1.5H4V1.5H1.5V4H-1.5V1.5H-4V-1.5H-1.5Z',
  'M-4 -2.4L-2.4 -4L0 -1.6L2.4 -4L4 -2.4L1.6 0L4 2.4L2.4 4L0 1.6L-2.4 4L-4 2.4L-1.6 0Z',
  'M-1.6 -4.5H1.6V4.5H-1.6Z',
];

/** The class that gives a strategy its colour. */
function strategyClass(strategy) {
  return `c${data.looks[strategy][0]}`;
}

/** The dash of its line. */
function dashOf(strategy) {
  return DASHES[data.looks[strategy][1]];
}

/** Draws its marker. */
function marker(strategy, x, y, parent) {
  const place = `translate(${x.toFixed(1)} ${y.toFixed(1)})`;
  return svg('path', { class: `marker ${strategyClass(strategy)}`, d: MARKERS[data.looks[strategy][2]], transform: place }, parent);
}

/** Its marker before a text. */
function swatch(strategy) {
  return html('span', { class: swatchClass(strategy) });
}

function swatchClass(strategy) {
  return `swatch ${strategyClass(strategy)} m${data.looks[strategy][2]}`;
}

/** Its name where there is little room: `caching +expandable_segments`. */
function shortName(strategy) {
  // A role such as `now: ` stays as it is.
  const [, role, whole] = data.strategies[strategy].match(/^(\w+: )?(.*)$/s);
  const [name, ...parameters] = whole.split(':');
  const short = (role || '') + (parameters.length ? `${name} +${parameters.join(':').replaceAll(':True', '')}` : name);
  return short.length > 30 ? `${short.slice(0, 29)}…` : short;
}

function lineSample(strategy) {
  const sample = svg('svg', { viewBox: '0 0 26 10', class: `plot ${strategyClass(strategy)}`, 'aria-hidden': 'true' });
  svg('line', { x1: 1, x2: 25, y1: 5, y2: 5, stroke: 'currentColor', 'stroke-width': 2, 'stroke-dasharray': dashOf(strategy) }, sample);
  marker(strategy, 13, 5, sample);
  return sample;
}

/** The legend entry of a mark. */
function key(draw, text) {
  const sample = svg('svg', { viewBox: '0 0 26 10', class: 'plot', 'aria-hidden': 'true' });
  sample.style.width = '1.6rem';
  draw(sample);
  return html('span', { class: 'key' }, sample, text);
}

