// Formats numbers. Amounts of memory are in KiB.

function bytes(kib) {
  if (kib === 0) return '0';
  const units = [[1 << 20, 'GiB'], [1 << 10, 'MiB'], [1, 'KiB']];
  const [size, name] = units.find(([unit]) => kib >= unit) || units[2];
  const value = kib / size;
  const digits = value < 10 ? 2 : value < 100 ? 1 : 0;
  return `${value.toFixed(digits)} ${name}`;
}

function count(number) {
  return Math.round(number).toLocaleString('en');
}

function duration(microseconds) {
  const units = [[1e6, 's'], [1e3, 'ms'], [1, 'µs']];
  const [size, name] = units.find(([unit]) => Math.abs(microseconds) >= unit) || units[2];
  const value = microseconds / size;
  return `${value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)} ${name}`;
}

/** Round numbers from `low` to `high`, about `wanted` of them. */
function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step / 1e6; tick += step) found.push(tick);
  return found;
}

/** The same for memory: steps are powers of two, so ticks are round in binary units. */
function memoryTicks(high, wanted) {
  const step = 2 ** Math.max(0, Math.ceil(Math.log2(high / Math.max(1, wanted))));
  const found = [];
  for (let tick = 0; tick <= high; tick += step) found.push(tick);
  return found;
}

/** A round amount without needless zeros: 512 MiB, 1 GiB, 1.5 GiB. */
function roundBytes(kib) {
  if (kib === 0) return '0';
  const [size, name] = [[1 << 20, 'GiB'], [1 << 10, 'MiB'], [1, 'KiB']].find(([unit]) => kib >= unit) || [1, 'KiB'];
  return `${Number((kib / size).toFixed(3))} ${name}`;
}

/** The last place of a sorted list whose value is at most `value`; 0 if there is none. */
function placeOf(list, value) {
  let low = 0;
  let high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return Math.max(0, low - 1);
}

