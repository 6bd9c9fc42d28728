// The entry point. A chart is drawn when it comes near the window: a page may have forty.

/** The data of all charts. */
let data;
const figures = [...document.querySelectorAll('figure.chart')];

function drawFigure(figure) {
  if (figure.dataset.drawn) return;
  figure.dataset.drawn = 'true';
  const host = figure.querySelector('.canvas');
  const index = Number(figure.dataset.index);
  if (figure.dataset.chart === 'timeline') drawChosen(figure, data.timelines, 'workload', ['zoom'], drawTimeline);
  if (figure.dataset.chart === 'leak') drawChosen(figure, data.leaks, 'growth', ['zoom-steps'], drawGrowth);
  if (figure.dataset.chart === 'map') drawMap(host, data.maps, data);
  if (figure.dataset.chart === 'flame') drawFlame(host, data.flames[index], index, data);
  if (figure.dataset.chart === 'ruler') drawRuler(host, data.rulers[index]);
  if (figure.dataset.chart === 'first') drawFirst(host, data.first[index], data);
  if (figure.dataset.chart === 'address') drawAddresses(host, data.addresses, data);
  figure.querySelectorAll('.controls:not([data-group]), .keys:not([data-group])').forEach(rove);
}

/**
 * One of several charts, chosen by its title. `name` is the name of the choice in the address; what is stored under `own`
 * belongs to one chart. Heading and sentence are those of the chart shown.
 */
function drawChosen(figure, charts, name, own, draw) {
  const host = figure.querySelector('.canvas');
  const picker = html('select', { 'aria-label': 'Workload' });
  charts.forEach((chart, place) => picker.append(html('option', { value: place }, chart.title)));
  const open = (place) => {
    const chart = charts[place];
    picker.value = place;
    const title = figure.querySelector('figcaption h3');
    title.textContent = chart.title;
    // The list below names it.
    title.hidden = charts.length > 1;
    // The page escaped these.
    figure.querySelector('figcaption p').innerHTML = chart.sentence;
    figure.closest('section').querySelector('h2').innerHTML = chart.headline;
    const next = html('div', { class: 'canvas' });
    host.replaceChildren(...(charts.length > 1 ? [html('div', { class: 'controls' }, html('label', {}, 'Workload', picker))] : []), next);
    draw(next, chart, data);
    next.querySelectorAll('.controls, .keys').forEach(rove);
  };
  picker.addEventListener('change', () => {
    pageState.set(name, picker.value === '0' ? null : charts[picker.value].title);
    own.forEach((one) => pageState.set(one, null));
    open(Number(picker.value));
    picker.focus();
  });
  open(Math.max(0, charts.findIndex((chart) => chart.title === pageState.get(name))));
}

function drawFigures() {
  const nearby = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      nearby.unobserve(entry.target);
      drawFigure(entry.target);
    }
  }, { rootMargin: '400px' });
  figures.forEach((figure) => nearby.observe(figure));
  window.addEventListener('beforeprint', () => figures.forEach(drawFigure));
}

/** Scrolls to a section. Charts above it are drawn before, because they would move it. */
function reveal(section, behavior) {
  const target = section && document.getElementById(section);
  if (!target) return;
  const isAbove = (figure) => target.compareDocumentPosition(figure) & Node.DOCUMENT_POSITION_PRECEDING;
  if (data) figures.filter(isAbove).forEach(drawFigure);
  target.scrollIntoView(behavior && { behavior });
}

async function start() {
  const tables = makeTables();
  if (!canUnpack) {
    const words = 'This browser cannot show the charts and the further rows of long tables: it has no DecompressionStream, which Chrome 80, Firefox 113 and Safari 16.4 have.';
    document.querySelector('main').prepend(html('p', { class: 'note oom' }, words));
    document.documentElement.dataset.ready = 'true';
    return;
  }
  data = restored(await unpacked(document.getElementById('data')));
  drawFigures();
  reveal(pageState.section(), 'instant');
  document.documentElement.dataset.ready = 'true';
  // Rows are at hand when the page is printed.
  for (const table of tables) await table.load();
}

const theme = document.getElementById('theme');
const isDark = () => (document.documentElement.dataset.theme || (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light')) === 'dark';
const nameTheme = () => { theme.textContent = isDark() ? 'Light' : 'Dark'; };
theme.addEventListener('click', () => {
  document.documentElement.dataset.theme = isDark() ? 'light' : 'dark';
  nameTheme();
});
theme.hidden = false;
nameTheme();

// Marks the current section in the navigation.
const links = new Map([...document.querySelectorAll('nav a')].map((link) => [link.hash.slice(1), link]));
const reading = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    links.forEach((link) => link.removeAttribute('aria-current'));
    links.get(entry.target.id)?.setAttribute('aria-current', 'true');
  }
}, { rootMargin: '-20% 0px -70% 0px' });
document.querySelectorAll('main > section').forEach((section) => reading.observe(section));

rove(document.querySelector('nav ul'));
// A link to a section keeps what the reader chose.
document.addEventListener('click', (event) => {
  const section = event.target.closest?.('a[href^="#"]')?.hash.slice(1);
  if (!section || !document.getElementById(section)) return;
  event.preventDefault();
  pageState.go(section);
  reveal(section);
});

start();
