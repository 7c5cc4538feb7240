//! What new memory contains.

use crate::config::Fill;
use std::mem::MaybeUninit;

/// Twice 0x7fedbeef: not a number as a 32-bit float, near the largest as a 64-bit one, large as an
/// integer.
const JUNK: [u8; 8] = 0x7fed_beef_7fed_beef_u64.to_le_bytes();

pub(super) fn fill(bytes: &mut [MaybeUninit<u8>], fill: Fill) {
    match fill {
        Fill::None => {}
        Fill::Zero => bytes.fill(MaybeUninit::new(0)),
        Fill::Junk => {
            let mut words = bytes.chunks_exact_mut(JUNK.len());
            words.by_ref().for_each(|word| word.copy_from_slice(&JUNK.map(MaybeUninit::new)));
            let tail = words.into_remainder();
            let junk = JUNK.map(MaybeUninit::new);
            tail.copy_from_slice(&junk[..tail.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(bytes: usize, how: Fill) -> Vec<u8> {
        let mut values = vec![MaybeUninit::new(1_u8); bytes];
        fill(&mut values, how);
        // SAFETY: every byte was initialised above.
        values.into_iter().map(|byte| unsafe { byte.assume_init() }).collect()
    }

    #[test]
    fn zeros_and_nothing() {
        assert_eq!(filled(3, Fill::Zero), [0; 3]);
        assert_eq!(filled(3, Fill::None), [1; 3]);
        assert_eq!(filled(0, Fill::Junk), []);
    }

    #[test]
    fn junk_is_no_number_to_its_last_byte() {
        for bytes in 0..40 {
            let junk = filled(bytes, Fill::Junk);
            let expected: Vec<u8> = JUNK.into_iter().cycle().take(bytes).collect();
            assert_eq!(junk, expected);
        }
        assert!(f64::from_le_bytes(JUNK) > 1e308);
        let word = [JUNK[0], JUNK[1], JUNK[2], JUNK[3]];
        assert!(f32::from_le_bytes(word).is_nan());
        assert_eq!(i32::from_le_bytes(word), 0x7fed_beef);
    }
}
