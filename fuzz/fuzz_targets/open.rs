//! Files of any format, recognised by content. This reaches the native format and every
//! compression.

#![no_main]

use std::{env, fs, process};

use libfuzzer_sys::fuzz_target;
use oomph::{
    base::NoProgress,
    trace::{self, Trace},
};

fuzz_target!(|file: &[u8]| {
    let path = env::temp_dir().join(format!("oomph-fuzz-{}", process::id()));
    fs::write(&path, file).expect("the temporary folder is writable");
    if let Ok(source) = trace::open(&path, &NoProgress)
        && let Ok(trace) = Trace::read(&*source)
    {
        // A native trace may be inconsistent, but reporting that must not panic.
        let _ = trace::check(&trace);
    }
});
