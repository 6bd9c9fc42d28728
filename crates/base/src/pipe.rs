//! What another process says, read while it runs.

use std::{
    io::{self, Read},
    sync::mpsc::{self, Receiver},
    thread,
};

/// Reads a pipe to its end on a thread of its own, so that its writer never blocks, and gives what it said: everything, or
/// where that is more than twice `most` at least the last `most` bytes. Who has no pipe says nothing.
///
/// ```
/// let said = oomph_base::last_bytes(Some(&b"one two three"[..]), 5).recv()?;
/// assert!(said.ends_with(b"three"));
/// # Ok::<(), std::sync::mpsc::RecvError>(())
/// ```
pub fn last_bytes(pipe: Option<impl Read + Send + 'static>, most: usize) -> Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut kept = Vec::new();
        let mut chunk = [0; 1 << 16];
        if let Some(mut pipe) = pipe {
            loop {
                match pipe.read(&mut chunk) {
                    Ok(0) => break,
                    Ok(count) => kept.extend_from_slice(&chunk[..count]),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(_) => break,
                }
                if kept.len() / 2 > most {
                    kept.drain(..kept.len() - most);
                }
            }
        }
        // Nobody may be waiting any more.
        let _ = sender.send(kept);
    });
    receiver
}
