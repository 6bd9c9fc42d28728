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
