//! Files of any format, recognised by content: the native format and every compression are reached this way.

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
        // A native trace may contradict itself, but saying so must not panic.
        let _ = trace::check(&trace);
    }
});
