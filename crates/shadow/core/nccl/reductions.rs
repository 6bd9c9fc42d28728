//! What a collective makes of the contributions of all ranks, where all of them are known.

/// `ncclRedOp_t`. Operations that a program creates itself are not computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Sum,
    Product,
    Max,
    Min,
    Average,
}

impl Operation {
    pub fn of(number: i32) -> Option<Operation> {
        use Operation::{Average, Max, Min, Product, Sum};
        [Sum, Product, Max, Min, Average].get(usize::try_from(number).ok()?).copied()
    }
}

/// `ncclDataType_t`: int8, uint8, int32, uint32, int64, uint64, float16, float32, float64, bfloat16, two of 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataType(pub i32);

impl DataType {
    pub fn width(self) -> u64 {
        match self.0 {
            0 | 1 | 10 | 11 => 1,
            6 | 9 => 2,
            4 | 5 | 8 => 8,
            _ => 4,
        }
    }

    /// Bytes of that many elements.
    pub fn bytes(self, count: u64) -> u64 {
        count.saturating_mul(self.width())
    }
}

/// An element, as it is computed with.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Number {
    Whole(i128),
    Real(f64),
}

/// Element by element over all ranks. `None` for types that are not computed.
pub fn reduced(contributions: &[Vec<u8>], kind: DataType, operation: Operation) -> Option<Vec<u8>> {
    let (first, rest) = contributions.split_first()?;
    let width = kind.width() as usize;
    let mut result = Vec::with_capacity(first.len());
    for start in (0..first.len()).step_by(width) {
        let mut number = decode(first.get(start..start + width)?, kind)?;
        for other in rest {
            number = combine(number, decode(other.get(start..start + width)?, kind)?, operation);
        }
        if operation == Operation::Average {
            number = match number {
                Number::Whole(sum) => Number::Whole(sum / contributions.len() as i128),
                Number::Real(sum) => Number::Real(sum / contributions.len() as f64),
            };
        }
        encode(number, kind, &mut result);
    }
    Some(result)
}

fn combine(one: Number, other: Number, operation: Operation) -> Number {
    match (one, other) {
        (Number::Whole(one), Number::Whole(other)) => Number::Whole(match operation {
            Operation::Sum | Operation::Average => one.wrapping_add(other),
            Operation::Product => one.wrapping_mul(other),
            Operation::Max => one.max(other),
            Operation::Min => one.min(other),
        }),
        (Number::Real(one), Number::Real(other)) => Number::Real(match operation {
            Operation::Sum | Operation::Average => one + other,
            Operation::Product => one * other,
            Operation::Max => one.max(other),
            Operation::Min => one.min(other),
        }),
        // Both come from one type.
        (one, _) => one,
    }
}

fn decode(bytes: &[u8], kind: DataType) -> Option<Number> {
    let mut wide = [0u8; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    let bits = u64::from_le_bytes(wide);
    Some(match kind.0 {
        0 => Number::Whole(i128::from(bits as i8)),
        2 => Number::Whole(i128::from(bits as i32)),
        4 => Number::Whole(i128::from(bits as i64)),
        1 | 3 | 5 => Number::Whole(i128::from(bits)),
        6 => Number::Real(half_to_f64(bits as u16)),
        7 => Number::Real(f64::from(f32::from_bits(bits as u32))),
        8 => Number::Real(f64::from_bits(bits)),
        9 => Number::Real(f64::from(f32::from_bits((bits as u32) << 16))),
        _ => return None,
    })
}

fn encode(number: Number, kind: DataType, to: &mut Vec<u8>) {
    let bits = match number {
        // Whole numbers wrap around, as on the device.
        Number::Whole(value) => value as u64,
        Number::Real(value) => match kind.0 {
            6 => u64::from(f64_to_half(value)),
            7 => u64::from((value as f32).to_bits()),
            9 => u64::from(f32_to_bfloat(value as f32)),
            _ => value.to_bits(),
        },
    };
    to.extend_from_slice(&bits.to_le_bytes()[..kind.width() as usize]);
}

/// IEEE 754 binary16: 5 bits of exponent, 10 bits of fraction.
fn half_to_f64(bits: u16) -> f64 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    match exponent {
        0 => sign * fraction * 2f64.powi(-24),
        31 if fraction == 0.0 => sign * f64::INFINITY,
        31 => f64::NAN,
        _ => sign * (1024.0 + fraction) * 2f64.powi(exponent - 25),
    }
}

/// Rounds to the nearest, ties to even.
fn f64_to_half(value: f64) -> u16 {
    let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
    let size = value.abs();
    if size.is_nan() {
        return 0x7e00;
    }
    if size >= 65_520.0 {
        return sign | 0x7c00;
    }
    // The exponent of the unit in the last place; subnormal numbers have that of the smallest normal ones.
    let exponent = if size < 2f64.powi(-14) { -24 } else { ((size.to_bits() >> 52) as i32 - 1023) - 10 };
    let units = (size * 2f64.powi(-exponent)).round_ties_even() as u16;
    // A fraction that rounds up to 2048 units carries into the exponent by itself.
    sign | (((exponent + 24) as u16) << 10).wrapping_add(units)
}

/// Rounds to the nearest, ties to even.
fn f32_to_bfloat(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of<const N: usize>(numbers: &[[u8; N]]) -> Vec<u8> {
        numbers.concat()
    }

    #[test]
    fn operations_follow_their_type() {
        let two = [of(&[1i64.to_le_bytes(), (-5i64).to_le_bytes()]), of(&[3i64.to_le_bytes(), 2i64.to_le_bytes()])];
        let whole = |operation| {
            let bytes = reduced(&two, DataType(4), operation).unwrap();
            bytes.chunks(8).map(|word| i64::from_le_bytes(word.try_into().unwrap())).collect::<Vec<_>>()
        };
        assert_eq!(whole(Operation::Sum), [4, -3]);
        assert_eq!(whole(Operation::Product), [3, -10]);
        assert_eq!((whole(Operation::Max), whole(Operation::Min)), (vec![3, 2], vec![1, -5]));
        assert_eq!(whole(Operation::Average), [2, -1]);
        let bytes = [vec![200u8], vec![100u8]];
        assert_eq!(reduced(&bytes, DataType(1), Operation::Sum), Some(vec![44]), "it wraps around");
        assert_eq!(reduced(&bytes, DataType(10), Operation::Sum), None, "8-bit floats are not computed");
        let real = [1.5f32.to_le_bytes().to_vec(), 2f32.to_le_bytes().to_vec()];
        assert_eq!(reduced(&real, DataType(7), Operation::Sum), Some(3.5f32.to_le_bytes().to_vec()));
        assert_eq!((Operation::of(4), Operation::of(5), Operation::of(-1)), (Some(Operation::Average), None, None));
    }

    #[test]
    fn half_floats_survive_the_way_there_and_back() {
        for bits in (0..0x7c01).chain(0x8000..0xfc01) {
            assert_eq!(f64_to_half(half_to_f64(bits)), bits, "{bits:#x}");
        }
        assert_eq!(half_to_f64(0x3c00), 1.0);
        assert_eq!((f64_to_half(65_519.0), f64_to_half(65_520.0)), (0x7bff, 0x7c00));
        assert_eq!((f64_to_half(2049.0), f64_to_half(2051.0)), (f64_to_half(2048.0), f64_to_half(2052.0)));
        assert_eq!((f32_to_bfloat(1.0), f32_to_bfloat(1.003_906_3)), (0x3f80, 0x3f80));
    }
}
