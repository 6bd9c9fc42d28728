// Lines to paste get a button that copies them.

for (const block of document.querySelectorAll('.paste')) {
  const line = block.textContent;
  const button = html('button', { type: 'button' }, 'Copy');
  button.addEventListener('click', async () => {
    try {
      await navigator.clipboard.writeText(line);
      button.textContent = 'Copied';
    } catch {
      // Without access to the clipboard the line is selected, so that the reader can copy it.
      getSelection().selectAllChildren(block.querySelector('code'));
      button.textContent = 'Selected';
    }
    setTimeout(() => { button.textContent = 'Copy'; }, 2000);
  });
  block.append(button);
}

