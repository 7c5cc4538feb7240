//! Sizes and counts as people write and read them.

use std::fmt;

/// Parses a size in bytes: `4096`, `512KiB`, `16GiB`, `1.5G`, `80GB`.
///
/// `K M G T`, alone or followed by `iB`, are powers of 1024, as everywhere around GPUs; `KB MB GB
/// TB` are powers of 1000. Case does not matter; `_` may group digits.
///
/// # Errors
/// Text that says what is wrong, for sizes that are not of this form, are 0, or exceed 64 bits.
///
/// ```
/// use alloc_lab::units::parse_size;
/// assert_eq!(parse_size("16GiB"), Ok(16 << 30));
/// assert_eq!(parse_size("1.5g"), Ok(3 << 29));
/// assert_eq!(parse_size("80GB"), Ok(80_000_000_000));
/// assert!(parse_size("twelve").is_err());
/// ```
pub fn parse_size(text: &str) -> Result<u64, String> {
    let clean: String = text.trim().chars().filter(|&c| c != '_').collect();
    let split = clean.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(clean.len());
    let (number, unit) = clean.split_at(split);
    let factor = factor(unit.trim()).ok_or_else(|| {
        format!("{text:?} is not a size: use bytes or a number with KiB, MiB, GiB, TiB or KB, MB, GB, TB")
    })?;
    let bytes = match number.parse::<u64>() {
        Ok(whole) => whole.checked_mul(factor),
        Err(_) => fractional(number, factor, text)?,
    };
    match bytes {
        Some(0) => Err("a size of 0 bytes makes no sense here".to_owned()),
        Some(bytes) => Ok(bytes),
        None => Err(format!("{text:?} is more than 64 bits can count")),
    }
}

/// Bytes in one `unit`.
fn factor(unit: &str) -> Option<u64> {
    let unit = unit.to_ascii_lowercase();
    let mut chars = unit.chars();
    let power = match chars.next() {
        None => return Some(1),
        Some('b') if unit == "b" => return Some(1),
        Some('k') => 1,
        Some('m') => 2,
        Some('g') => 3,
        Some('t') => 4,
        Some(_) => return None,
    };
    match chars.as_str() {
        "" | "ib" => Some(1024u64.pow(power)),
        "b" => Some(1000u64.pow(power)),
        _ => None,
    }
}

/// `number × factor` for a number with a fraction (or with too many digits for 64 bits).
fn fractional(number: &str, factor: u64, text: &str) -> Result<Option<u64>, String> {
    let value: f64 = number.parse().map_err(|_| format!("{text:?} is not a size"))?;
    let bytes = (value * factor as f64).round();
    Ok((bytes < u64::MAX as f64).then_some(bytes as u64))
}

/// A count with its thousands set apart: `1,234,567`.
#[derive(Clone, Copy, Debug)]
pub struct Thousands(pub u64);

impl fmt::Display for Thousands {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = self.0.to_string();
        let mut out = String::with_capacity(digits.len() + digits.len() / 3);
        for (i, c) in digits.chars().enumerate() {
            if i > 0 && (digits.len() - i).is_multiple_of(3) {
                out.push(',');
            }
            out.push(c);
        }
        f.pad(&out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_every_form() {
        for (text, bytes) in [
            ("1", 1),
            ("4096", 4096),
            ("4096B", 4096),
            ("2K", 2048),
            ("2kb", 2000),
            ("512 MiB", 512 << 20),
            ("80G", 80 << 30),
            ("80gb", 80_000_000_000),
            ("0.5TiB", 1 << 39),
            ("150_109_880_320", 150_109_880_320),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_not_a_size_is_refused() {
        for text in ["", "G", "12X", "1.2.3G", "-5", "12GiBs", "kk", "0", "0.0G", "99999999999G"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
        assert!(parse_size("99999999999999999999").unwrap_err().contains("64 bits"));
    }

    #[test]
    fn thousands_are_grouped() {
        assert_eq!(Thousands(0).to_string(), "0");
        assert_eq!(Thousands(999).to_string(), "999");
        assert_eq!(Thousands(1000).to_string(), "1,000");
        assert_eq!(Thousands(1_234_567).to_string(), "1,234,567");
    }
}
