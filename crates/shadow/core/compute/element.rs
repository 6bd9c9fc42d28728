//! Types and values of elements.

use crate::values::KeptValues;

/// The type of an element, as C++ mangles it and as PyTorch's `ScalarType` numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    Bool,
    U8,
    I8,
    I16,
    I32,
    I64,
    F32,
    F64,
}

/// One element. Integers and truth values are `Int`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    Int(i64),
    Float(f64),
}

/// An element that may not be known.
pub type Maybe = Option<Scalar>;

impl Element {
    pub fn from_mangled(letter: u8) -> Option<Element> {
        Some(match letter {
            b'b' => Element::Bool,
            b'h' => Element::U8,
            b'a' => Element::I8,
            b's' => Element::I16,
            b'i' => Element::I32,
            b'l' => Element::I64,
            b'f' => Element::F32,
            b'd' => Element::F64,
            _ => return None,
        })
    }

    /// `c10::ScalarType`.
    pub fn from_scalar_type(number: i8) -> Option<Element> {
        Some(match number {
            0 => Element::U8,
            1 => Element::I8,
            2 => Element::I16,
            3 => Element::I32,
            4 => Element::I64,
            6 => Element::F32,
            7 => Element::F64,
            11 => Element::Bool,
            _ => return None,
        })
    }

    pub fn size(self) -> u64 {
        match self {
            Element::Bool | Element::U8 | Element::I8 => 1,
            Element::I16 => 2,
            Element::I32 | Element::F32 => 4,
            Element::I64 | Element::F64 => 8,
        }
    }

    /// The value of an element's bytes.
    pub fn decode(self, bytes: &[u8]) -> Maybe {
        Some(match self {
            Element::Bool => Scalar::Int(i64::from(*bytes.first()? != 0)),
            Element::U8 => Scalar::Int(i64::from(*bytes.first()?)),
            Element::I8 => Scalar::Int(i64::from(*bytes.first()? as i8)),
            Element::I16 => Scalar::Int(i64::from(i16::from_le_bytes(bytes.try_into().ok()?))),
            Element::I32 => Scalar::Int(i64::from(i32::from_le_bytes(bytes.try_into().ok()?))),
            Element::I64 => Scalar::Int(i64::from_le_bytes(bytes.try_into().ok()?)),
            Element::F32 => Scalar::Float(f64::from(f32::from_le_bytes(bytes.try_into().ok()?))),
            Element::F64 => Scalar::Float(f64::from_le_bytes(bytes.try_into().ok()?)),
        })
    }

    /// The bytes of a value, converted as C++ does. A float outside an integer's range has no defined value.
    pub fn encode(self, value: Scalar) -> Option<Vec<u8>> {
        if let Element::Bool = self {
            return Some(vec![u8::from(value.is_true())]);
        }
        if let Element::F32 | Element::F64 = self {
            let float = value.float();
            return Some(if self == Element::F32 {
                (float as f32).to_le_bytes().to_vec()
            } else {
                float.to_le_bytes().to_vec()
            });
        }
        let integer = match value {
            Scalar::Int(integer) => integer,
            Scalar::Float(float) if self.holds(float) => float as i64,
            Scalar::Float(_) => return None,
        };
        Some(integer.to_le_bytes()[..self.size() as usize].to_vec())
    }

    /// Whether the conversion of a float to this integer is defined. PyTorch converts to `uint8` by way of 64 bits.
    fn holds(self, float: f64) -> bool {
        let limit = match self {
            Element::I8 => 128.0,
            Element::I16 => 32_768.0,
            Element::I32 => 2_147_483_648.0,
            _ => 9e18,
        };
        float.trunc() >= -limit && float.trunc() < limit
    }

    /// A value as this type holds it.
    pub fn convert(self, value: Scalar) -> Maybe {
        self.decode(&self.encode(value)?)
    }
}

impl Scalar {
    pub fn is_true(self) -> bool {
        match self {
            Scalar::Int(integer) => integer != 0,
            Scalar::Float(float) => float != 0.0,
        }
    }

    pub fn float(self) -> f64 {
        match self {
            Scalar::Int(integer) => integer as f64,
            Scalar::Float(float) => float,
        }
    }
}

/// The element at an address.
pub fn load(values: &KeptValues, address: u64, element: Element) -> Maybe {
    element.decode(&values.get(address, element.size())?)
}

/// Stores elements that lie one behind the other; those that are not known are forgotten.
pub fn store_all(values: &mut KeptValues, address: u64, element: Element, elements: &[Maybe]) {
    let size = element.size();
    values.forget(address, elements.len() as u64 * size);
    let mut known: Vec<u8> = Vec::new();
    let mut start = address;
    for (index, value) in elements.iter().enumerate() {
        let at = address + index as u64 * size;
        match value.and_then(|value| element.encode(value)) {
            Some(bytes) => {
                if known.is_empty() {
                    start = at;
                }
                known.extend(bytes);
            }
            None if !known.is_empty() => values.put(start, std::mem::take(&mut known)),
            None => {}
        }
    }
    if !known.is_empty() {
        values.put(start, known);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_keep_their_type() {
        assert_eq!(Element::I8.decode(&[0xff]), Some(Scalar::Int(-1)));
        assert_eq!(Element::Bool.convert(Scalar::Int(7)), Some(Scalar::Int(1)));
        assert_eq!(Element::U8.convert(Scalar::Int(257)), Some(Scalar::Int(1)));
        assert_eq!(Element::I64.convert(Scalar::Float(-2.7)), Some(Scalar::Int(-2)));
        assert_eq!(Element::I64.encode(Scalar::Float(f64::NAN)), None);
        assert_eq!(Element::F32.convert(Scalar::Float(0.1)), Some(Scalar::Float(f64::from(0.1f32))));
    }

    #[test]
    fn unknown_elements_leave_gaps() {
        let mut values = KeptValues::default();
        values.put(0x1000, vec![9; 6]);
        let one = Some(Scalar::Int(1));
        store_all(&mut values, 0x1000, Element::I16, &[one, None, one]);
        assert_eq!(
            (values.get(0x1000, 2), values.get(0x1002, 1), values.get(0x1004, 2)),
            (Some(vec![1, 0]), None, Some(vec![1, 0]))
        );
    }
}
