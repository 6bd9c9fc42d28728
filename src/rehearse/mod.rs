//! Rehearsals: a user's own program on the shadow GPU, which computes nothing. Writes the libraries that stand in for
//! NVIDIA's, starts the program and gathers what it recorded. Knows nothing of terminals.

pub mod families;
pub mod forwarder;
pub mod needs;
