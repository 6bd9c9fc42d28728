//! A miniature of PyTorch's autograd, and the programs that run on it.
//!
//! A trace is not made from a table of sizes. A model's operators run on a [`machine`] whose tensors are
//! reference-counted; the forward pass records a [`graph`]; [`saving`] decides what is kept for [`backward`]; a block is
//! freed when its last reference is released. The order of allocations and frees therefore follows from the model's code, for
//! every shape and every combination of [`techniques`]. Recordings of PyTorch 2.11 on an H200 confirm it, event by event
//! (`tests/integration/transformer_truth`).
//!
//! From low to high: `graph` (types), `machine`, `saving` and `backward` (autograd), `weights` and `optimizer`, `layers`
//! (operators), `models` (architectures), `trainer` (what a training program does), `faults` (programs that do it wrong).
//! A new operator is a method in `layers` and a variant of [`graph::GraphOperation`]; a new architecture implements
//! [`machine::ModelArchitecture`] in `models`; a new technique is a word in `techniques`
//! with its effect on the numbers, and the code that reads it.

mod backward;
mod faults;
mod graph;
mod layers;
mod machine;
/// The architectures. Each implements [`ModelArchitecture`](machine::ModelArchitecture) in terms of the layers.
mod models {
    pub(crate) mod decoder;
    pub(crate) mod encoder;
    pub(crate) mod encoder_decoder;
    pub(crate) mod resnet;
    pub(crate) mod serving;
    pub(crate) mod transformer;
}
mod optimizer;
mod plan;
#[cfg(test)]
mod recorded_programs;
mod saving;
mod techniques;
mod trainer;
mod weights;

pub(crate) use faults::FAULTY_TRAINING;
pub(crate) use models::{
    decoder::{DECODER, GENERATION},
    encoder::{ENCODER, VISION_ENCODER},
    encoder_decoder::ENCODER_DECODER,
    resnet::RESNET,
    serving::SERVING,
    transformer::TRANSFORMER,
};
pub use techniques::{NumericEffect, OPTIMIZER_WORDS};
pub(crate) use techniques::{TECHNIQUES, TechniqueWords};
