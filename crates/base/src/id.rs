//! Identities: small integers that must not be mixed up.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A device address. Zero is never a valid one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Address(pub u64);

impl Address {
    /// The address that no block has.
    pub const NULL: Address = Address(0);

    /// The address `bytes` further on.
    #[must_use]
    pub const fn offset(self, bytes: u64) -> Address {
        Address(self.0 + bytes)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

macro_rules! index {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl $name {
            /// The position in a table that is indexed by this identity.
            #[must_use]
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

index! {
    /// A stream, numbered densely from the default stream 0. What the driver calls it is the device's business
    /// (`Device::stream_handle`).
    StreamId(u16)
}
index! {
    /// A host thread, numbered densely.
    ThreadId(u16)
}
index! {
    /// An event on a stream, as the device hands it out.
    EventId(u32)
}
index! {
    /// An interned call site; 0 is "unknown".
    SiteId(u32)
}
index! {
    /// An interned tag (category and layer); 0 is "untagged".
    TagId(u32)
}

impl StreamId {
    /// The default stream.
    pub const DEFAULT: StreamId = StreamId(0);
}
