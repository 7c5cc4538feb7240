//! Configuration from the environment.

use alloc_core::{Config, Policy};

/// The settings string, in the words of `PYTORCH_CUDA_ALLOC_CONF`.
pub(crate) const SETTINGS: &str = "GPU_ALLOC_CONF";
/// The rules: `ours` (the default) or `pytorch`.
pub(crate) const POLICY: &str = "GPU_ALLOC_POLICY";

/// The configuration that the two variables ask for.
///
/// # Errors
/// What is wrong with which of them.
pub(crate) fn from(policy: Option<&str>, settings: Option<&str>) -> Result<Config, String> {
    let policy = match policy.map(str::trim) {
        None | Some("" | "ours") => Policy::Ours,
        Some("pytorch") => Policy::Pytorch,
        Some(other) => return Err(format!("{POLICY}: `{other}` is neither `ours` nor `pytorch`")),
    };
    let mut config = Config::of(policy);
    if let Some(settings) = settings.filter(|text| !text.trim().is_empty()) {
        config.apply(settings).map_err(|error| format!("{SETTINGS}: {error}"))?;
    }
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_variables_are_read_and_mistakes_name_theirs() {
        assert_eq!(from(None, None).expect("defaults").policy, Policy::Ours);
        let config = from(Some("pytorch"), Some("expandable_segments:True")).expect("valid");
        assert_eq!(config.policy, Policy::Pytorch);
        assert_eq!(config.settings.expandable_segments, Some(true));
        let error = from(Some("mine"), None).expect_err("unknown");
        assert!(error.starts_with("GPU_ALLOC_POLICY: `mine`"), "{error}");
        let error = from(None, Some("max_split:3")).expect_err("unknown");
        assert!(error.starts_with("GPU_ALLOC_CONF: "), "{error}");
    }
}
