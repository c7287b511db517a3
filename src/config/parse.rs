//! Values of single flags: each function takes what was typed and says in words why it will not do.

use super::Secret;

/// A share, 0 to 1.
pub fn ratio(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (0.0..=1.0).contains(&value) => Ok(value),
        Ok(_) => Err("must be from 0 to 1".to_owned()),
        Err(_) => Err("not a number; must be from 0 to 1".to_owned()),
    }
}

/// A factor, at least 1 and finite.
pub fn factor(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 1.0 => Ok(value),
        Ok(_) => Err("must be a finite number of at least 1".to_owned()),
        Err(_) => Err("not a number; must be at least 1".to_owned()),
    }
}

/// A factor, at least 1 and finite, or 0 for none.
pub fn factor_or_off(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(0.0) => Ok(0.0),
        _ => factor(text)
            .map_err(|why| format!("{why}, or 0 (a worker below its even share is never full)")),
    }
}

/// A temperature: 0 or more, finite.
pub fn temperature(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        Ok(_) => Err("must be a finite number of at least 0".to_owned()),
        Err(_) => Err("not a number; must be at least 0".to_owned()),
    }
}

/// Entries of a provided-buffer ring: a power of two, at most 32,768 (io_uring_register_buf_ring(3)).
pub fn buffer_count(text: &str) -> Result<u16, String> {
    match text.parse::<u16>() {
        Ok(value) if value.is_power_of_two() && (8..=32_768).contains(&value) => Ok(value),
        _ => Err("must be a power of two from 8 to 32768".to_owned()),
    }
}

/// A path in origin form, without a query.
pub fn path(text: &str) -> Result<String, String> {
    let is_clean = text
        .bytes()
        .all(|b| b.is_ascii_graphic() && !matches!(b, b'?' | b'#'));
    if text.starts_with('/') && is_clean {
        Ok(text.to_owned())
    } else {
        Err("must begin with / and hold no space, query or fragment".to_owned())
    }
}

/// A key, whatever it holds: clap repeats a value it refuses, so that the check comes later
/// (`access::keys::check`).
pub fn secret(text: &str) -> Result<Secret, std::convert::Infallible> {
    Ok(Secret::new(text))
}

/// A header field's name (RFC 9110 section 5.1), lower-cased.
pub fn header_name(text: &str) -> Result<String, String> {
    http::HeaderName::from_bytes(text.as_bytes())
        .map(|name| name.as_str().to_owned())
        .map_err(|_| format!("'{text}' is not a header field's name"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_and_factors_refuse_what_is_out_of_range() {
        for bad in ["nan", "NaN", "-0.1", "1.0001", "inf", "", "x", "1,0"] {
            assert!(ratio(bad).is_err(), "{bad}");
        }
        for bad in ["nan", "0.99", "inf", "-inf", "-1", "", "two"] {
            assert!(factor(bad).is_err(), "{bad}");
        }
        for good in ["0", "1", "0.3", "1e-3"] {
            assert!(ratio(good).is_ok(), "{good}");
        }
        assert_eq!(factor("1"), Ok(1.0));
        for bad in ["0.5", "nan", "-1", "inf", "", "off"] {
            assert!(factor_or_off(bad).is_err(), "{bad}");
        }
        assert_eq!(
            ["0", "0.0", "1", "1.25"].map(factor_or_off),
            [0.0, 0.0, 1.0, 1.25].map(Ok)
        );
    }

    #[test]
    fn buffer_counts_are_powers_of_two() {
        assert_eq!(buffer_count("512"), Ok(512));
        for bad in ["0", "4", "500", "65536", "-8", "x"] {
            assert!(buffer_count(bad).is_err(), "{bad}");
        }
    }
}
