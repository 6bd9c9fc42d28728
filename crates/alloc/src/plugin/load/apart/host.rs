//! The process that a plugin is loaded into.

use std::{io, os::unix::net::UnixStream, time::Duration};

use super::{
    signals,
    wire::{self, Answer, Question},
};
use crate::plugin::load::{ENTRY, PluginError, allocator::Allocator, call::Call, choose, library::Library, wish::Wish};
use crate::strategy::SpecError;

/// Whoever asks knows first that a call takes too long; this process ends by itself only where nobody asks any more.
const GRACE: Duration = Duration::from_secs(5);

/// Loads the plugin that `parameters` (what follows `plugin:`) name, and answers for it until nobody asks any more: from now
/// on this process does not end at Ctrl-C.
pub fn host(parameters: &str, mut connection: UnixStream) -> io::Result<()> {
    signals::ignore_interrupts();
    let mut library = match load(parameters) {
        Ok(library) => library,
        Err(refusal) => return wire::answer_load(&mut connection, Some(&refusal)),
    };
    wire::answer_load(&mut connection, None)?;
    loop {
        let question = match wire::question(&mut connection) {
            Ok(question) => question,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error),
        };
        wire::answer(&mut connection, put(&question, &mut library))?;
    }
}

fn load(parameters: &str) -> Result<Library, String> {
    let wish = Wish::read(&ENTRY, parameters).map_err(|error: SpecError| error.to_string())?;
    let choice = choose(&wish).map_err(|error| error.to_string())?;
    let timeout = wish.timeout.saturating_add(GRACE);
    Library::open(wish.file, &choice, timeout).map_err(|error: PluginError| error.to_string())
}

/// Puts a question to the library. One that is loaded here is never gone: this process would be.
fn put(question: &Question, library: &mut Library) -> Answer {
    let Question { call, device, stream } = *question;
    match call {
        Call::Load => None,
        Call::Alloc { bytes } => library.alloc(bytes as usize, device, stream).ok().map(|address| address.0),
        Call::Free { address, bytes } => library.free(address, bytes as usize, device, stream).ok().map(|()| 0),
        Call::RecordStream { address } => library.record_stream(address, stream).ok().filter(|told| *told).map(|_| 0),
        Call::Reset => library.reset().ok().map(|()| 0),
        Call::Reserved => library.reserved(device).ok().flatten(),
        Call::Limit { bytes } => library.limit(device, bytes).ok().filter(|told| *told).map(|_| 0),
    }
}
