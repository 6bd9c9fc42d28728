//! Ours as a plugin.
