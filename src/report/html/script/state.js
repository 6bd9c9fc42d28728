// What the page carries (compressed data), and what the reader chose (zoom, case, filter), which is kept in the address of the
// page: #section?name=value&name=value.

const canUnpack = typeof DecompressionStream === 'function';

/** The JSON of a script element with zlib data in base64. */
async function unpacked(element) {
  const compressed = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
  const plain = new Blob([compressed]).stream().pipeThrough(new DecompressionStream('deflate'));
  return new Response(plain).json();
}

/** Data whose series are lists again: they are stored as `{ differences: [first, second - first, ...] }`. */
function restored(value) {
  if (Array.isArray(value)) return typeof value[0] === 'object' ? value.map(restored) : value;
  if (value === null || typeof value !== 'object') return value;
  if (Array.isArray(value.differences)) {
    let sum = 0;
    return value.differences.map((step) => (sum += step));
  }
  for (const name of Object.keys(value)) value[name] = restored(value[name]);
  return value;
}

const pageState = (() => {
  const parts = () => {
    const [section, values = ''] = location.hash.slice(1).split('?');
    return { section, values: new URLSearchParams(values) };
  };
  const store = (section, values) => {
    const text = values.toString();
    history.replaceState(null, '', `#${section}${text && `?${text}`}`);
  };
  return {
    /** The value of a name, or null. */
    get: (name) => parts().values.get(name),
    /** Stores a value; null removes it. The browser's history does not grow. */
    set: (name, value) => {
      const { section, values } = parts();
      if (value === null) values.delete(name);
      else values.set(name, value);
      store(section, values);
    },
    /** The section in the address. */
    section: () => parts().section,
    /** Puts a section into the address; what the reader chose stays there. */
    go: (section) => store(section, parts().values),
  };
})();

