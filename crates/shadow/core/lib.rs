//! The shared library of the shadow GPU: CUDA's libraries, with books and a clock but without a device.
//!
//! `binding` is the way in: forwarders (small ELF files with the sonames that programs link) call `oomph_shadow_bind`,
//! which gives each of their functions its code. Functions with behaviour are in one file per subject; all others are
//! served from the table of `../src/functions`: every out-parameter is written, success is returned.
//!
//! Rules of this crate: no dependencies but `oomph_driver` (it is compiled by `rustc` alone, see `../build.rs`); one lock
//! ([`state`]); pointers of callers are only touched through [`arguments`], which refuses device addresses, because
//! nothing is there.

#![deny(unsafe_op_in_unsafe_fn)]
#![allow(unsafe_code, reason = "the C interface of CUDA")]
#![allow(non_snake_case, reason = "functions have the names of CUDA's symbols")]
#![allow(missing_docs, dead_code, unreachable_pub, reason = "a shared library: nothing but C symbols is exported")]
#![allow(clippy::too_many_arguments, reason = "CUDA's own argument lists")]

#[path = "../src/functions/mod.rs"]
mod functions;
#[path = "../src/served_call.rs"]
mod served_call;

#[macro_use]
mod arguments;
mod binding;
mod card;
mod generic;
mod report;
mod served;
mod state;

mod capture;
mod compute;
mod copies;
mod cublas;
mod cudnn {
    //! cuDNN: the backend API with descriptors, and the older calls with sizes.

    pub mod backend;
    mod convolutions;
    pub mod installed;
    #[cfg(test)]
    mod installed_tests;
    pub mod legacy;
    pub mod recurrent;
    mod stream_k;
    #[cfg(test)]
    mod stream_k_tests;
    mod twins;
    mod workspace;

    /// `CUDNN_STATUS_SUCCESS`.
    const SUCCESS: i32 = 0;
    /// `CUDNN_STATUS_BAD_PARAM`.
    const BAD_PARAM: i32 = 2000;
}
mod driver_api;
mod errors;
#[cfg(test)]
mod every_function;
mod host_memory;
mod launch;
mod memory;
mod modules;
mod nccl;
mod nvml;
mod occupancy;
mod pools;
mod properties;
mod streams;
mod values;
mod virtual_memory;

/// All functions with behaviour, by subject.
const SUBJECTS: &[&[(&str, binding::Code)]] = &[
    capture::FUNCTIONS,
    copies::FUNCTIONS,
    cublas::FUNCTIONS,
    cudnn::backend::FUNCTIONS,
    cudnn::legacy::FUNCTIONS,
    cudnn::recurrent::FUNCTIONS,
    driver_api::FUNCTIONS,
    errors::FUNCTIONS,
    host_memory::FUNCTIONS,
    launch::FUNCTIONS,
    memory::FUNCTIONS,
    modules::FUNCTIONS,
    nccl::FUNCTIONS,
    nvml::FUNCTIONS,
    occupancy::FUNCTIONS,
    pools::FUNCTIONS,
    properties::FUNCTIONS,
    streams::FUNCTIONS,
    virtual_memory::FUNCTIONS,
];
