//! Enums whose values have names.

/// Defines an enum whose values have one name each: in files, in tables and in messages.
///
/// ```
/// oomph_base::named_enum! {
///     /// The parts of a day.
///     pub enum DayPart {
///         /// From sunrise to noon.
///         Morning = "morning",
///         /// From noon to sunset.
///         Afternoon = "afternoon",
///     }
/// }
/// assert_eq!(DayPart::ALL.map(DayPart::name), ["morning", "afternoon"]);
/// assert_eq!(serde_json::to_string(&DayPart::Morning).unwrap(), "\"morning\"");
/// ```
#[macro_export]
macro_rules! named_enum {
    ($(#[$meta:meta])* pub enum $type:ident { $($(#[$value_meta:meta])* $value:ident = $name:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, ::serde::Serialize, ::serde::Deserialize)]
        pub enum $type { $($(#[$value_meta])* #[serde(rename = $name)] $value,)* }

        impl $type {
            /// Every value, in the order of declaration.
            pub const ALL: [$type; [$($name),*].len()] = [$($type::$value),*];

            /// The name in files, tables and messages.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $($type::$value => $name,)* }
            }
        }

        impl ::std::fmt::Display for $type {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.pad(self.name())
            }
        }
    };
}
