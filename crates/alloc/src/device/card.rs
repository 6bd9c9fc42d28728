//! What a simulated device has, as users name it (`--card`), and NVIDIA cards by name: memory, multiprocessors, capability, cache.

use std::{fmt, str::FromStr, sync::LazyLock};

use oomph_base::{MIB, parse_toml};
use serde::Deserialize;

use super::{
    DeviceSpec,
    sim::{Profile, SimConfig, SimConfigError},
};

/// A card: a size such as `24GiB`, a name, or the file of a profile. See [`SimConfig::of_card`].
#[derive(Clone, Debug, PartialEq)]
pub struct Card {
    text: String,
    config: Box<SimConfig>,
}

impl Card {
    /// Total memory.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.config.total_bytes()
    }

    /// What is known about a card that was named.
    #[must_use]
    pub fn facts(&self) -> Option<&'static CardFacts> {
        CardFacts::named(&self.text)
    }

    /// What the context takes before the first allocation.
    #[must_use]
    pub fn context_bytes(&self) -> u64 {
        self.config.profile.context_bytes
    }

    /// A simulated device with the properties of the card and enough memory to search for what would fit: at least
    /// that of the H200.
    #[must_use]
    pub fn device_for_search(&self) -> DeviceSpec {
        // A size has the properties of the default device.
        let is_size = self.config.capacity_bytes.is_some();
        let text = if is_size { "sim".to_owned() } else { format!("sim:{self}") };
        DeviceSpec::simulated(&text, self.config.profile.clone().into())
            .with_room_for(self.total_bytes().max(Profile::h200().total_bytes))
    }
}

impl FromStr for Card {
    type Err = SimConfigError;

    fn from_str(text: &str) -> Result<Card, SimConfigError> {
        let text = text.trim();
        Ok(Card { text: text.to_owned(), config: Box::new(SimConfig::of_card(text)?) })
    }
}

/// As it was typed.
impl fmt::Display for Card {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// What is known about a card besides its memory. The context was measured on the H200 only.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CardFacts {
    /// Its name on the command line.
    pub name: String,
    /// The vendor's name, as PyTorch shows it.
    pub vendor_name: String,
    #[serde(default)]
    total_bytes: u64,
    #[serde(default)]
    total_mib: u64,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Compute capability.
    pub capability: [u32; 2],
    /// Bytes of the L2 cache.
    pub l2_bytes: u64,
    /// Whether memory and context were measured by this project.
    #[serde(default)]
    pub measured: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CardFile {
    card: Vec<CardFacts>,
}

impl CardFacts {
    /// All cards.
    pub fn all() -> &'static [CardFacts] {
        #[expect(clippy::expect_used, reason = "the table is part of this crate, and a test reads it")]
        static CARDS: LazyLock<Vec<CardFacts>> = LazyLock::new(|| {
            let file: CardFile = parse_toml(include_str!("cards.toml")).expect("the committed table is well formed");
            file.card
        });
        &CARDS
    }

    /// The card of that name; capitals do not matter.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static CardFacts> {
        CardFacts::all().iter().find(|card| card.name.eq_ignore_ascii_case(name))
    }

    /// Total memory.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes + self.total_mib * MIB
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oomph_base::GIB;

    #[test]
    fn cards_are_sizes_or_names() {
        let card = |text: &str| text.parse::<Card>().unwrap();
        assert_eq!(card("24GiB").total_bytes(), 24 * GIB);
        assert_eq!(card(" h200 ").total_bytes(), Profile::h200().total_bytes);
        assert_eq!(card("24GiB").to_string(), "24GiB");
        let message = "24".parse::<Card>().unwrap_err().to_string();
        assert!(message.contains("did you mean 24GiB?"), "{message}");
        assert!("0".parse::<Card>().unwrap_err().to_string().contains("too small"));
    }

    #[test]
    fn searches_have_room() {
        let device = |text: &str| text.parse::<Card>().unwrap().device_for_search();
        assert_eq!(device("24GiB"), DeviceSpec::default());
        assert_eq!(device("24GiB").to_string(), "sim");
        assert_eq!(device("h200").to_string(), "sim:h200");
        assert_eq!(device("200GiB").total_bytes(), Ok(200 * GIB));
    }

    #[test]
    fn cards_are_possible_and_have_different_names() {
        let cards = CardFacts::all();
        for (place, card) in cards.iter().enumerate() {
            assert!((7 * GIB..200 * GIB).contains(&card.total_bytes()), "{card:?}");
            assert!((card.total_bytes == 0) != (card.total_mib == 0), "one figure: {card:?}");
            assert!(card.multiprocessors > 0 && card.l2_bytes > 0 && card.capability[0] >= 7, "{card:?}");
            assert!(cards[..place].iter().all(|other| other.name != card.name), "{}", card.name);
            // A size such as 24GiB begins with a digit.
            assert!(card.name.starts_with(|c: char| c.is_ascii_lowercase()), "{}", card.name);
        }
    }

    #[test]
    fn the_measured_card_is_the_one_of_the_profile() {
        let measured: Vec<&CardFacts> = CardFacts::all().iter().filter(|card| card.measured).collect();
        assert_eq!(measured.len(), 1);
        assert_eq!(measured[0].total_bytes(), Profile::h200().total_bytes);
        assert_eq!(CardFacts::named("H200"), Some(measured[0]));
    }
}
