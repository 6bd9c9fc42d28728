// The entry point. A chart is drawn when it comes near the window: a page may have forty.

const data = JSON.parse(document.getElementById('data').textContent);
const figures = [...document.querySelectorAll('figure.chart')];

function drawFigure(figure) {
  if (figure.dataset.drawn) return;
  figure.dataset.drawn = 'true';
  const host = figure.querySelector('.canvas');
  const index = Number(figure.dataset.index);
  if (figure.dataset.chart === 'timeline') drawTimeline(host, data.timelines[index], data);
  if (figure.dataset.chart === 'leak') drawGrowth(host, data.leaks[index], data);
  if (figure.dataset.chart === 'map') drawMap(host, data.maps, data);
}

const nearby = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    nearby.unobserve(entry.target);
    drawFigure(entry.target);
  }
}, { rootMargin: '400px' });
figures.forEach((figure) => nearby.observe(figure));
window.addEventListener('beforeprint', () => figures.forEach(drawFigure));

document.querySelectorAll('table.sortable').forEach(makeSortable);
document.querySelectorAll('table[data-filter]').forEach(makeFilterable);

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

document.documentElement.dataset.ready = 'true';
