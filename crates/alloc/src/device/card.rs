//! What a simulated device has, as users name it: `--card`.

use std::{fmt, str::FromStr};

use super::{
    CardFacts, DeviceSpec,
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
}
