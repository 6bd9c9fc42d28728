//! The architectures. Each implements [`ModelArchitecture`](super::machine::ModelArchitecture) in terms of the layers.

pub(crate) mod resnet;
pub(crate) mod serving;
pub(crate) mod transformer;
