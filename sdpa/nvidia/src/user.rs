//! The user's cache folder of this library, with compiled kernels and ledgers (records of which features computed correctly together).

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The variable that turns disk caches on or off.
const SWITCH: &str = "SDPA_CACHE";
/// The variable with a folder to use instead of the user's.
const FOLDER: &str = "SDPA_CACHE_DIR";

/// The error for an environment variable with an invalid value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{variable}: got {value:?}, expected {expected}")]
#[non_exhaustive]
pub struct SettingError {
    /// The name of the environment variable.
    pub variable: &'static str,
    /// The value of the environment variable.
    pub value: String,
    /// A description of the values that the environment variable accepts.
    pub expected: &'static str,
}

fn wrong(variable: &'static str, value: OsString, expected: &'static str) -> SettingError {
    SettingError { variable, value: value.to_string_lossy().into_owned(), expected }
}

/// Returns whether disk caches are on. They are, unless the environment variable `SDPA_CACHE` is `off`.
///
/// # Errors
/// Fails if `SDPA_CACHE` is set to anything but `on` or `off`.
pub fn are_caches_on() -> Result<bool, SettingError> {
    switch(|name| std::env::var_os(name))
}

/// Returns the path of the subfolder `name` of the user's cache folder. It is in `SDPA_CACHE_DIR` if that environment variable is set.
/// Otherwise it is in the folder `sdpa` in `XDG_CACHE_HOME`, or in `~/.cache/sdpa` (on macOS `~/Library/Caches/sdpa`). Returns `None` if
/// the user has no home folder. It does not access the disk.
///
/// # Errors
/// Fails if `SDPA_CACHE_DIR` is not an absolute path.
pub fn folder(name: &str) -> Result<Option<PathBuf>, SettingError> {
    Ok(base(|name| std::env::var_os(name))?.map(|base| base.join(name)))
}

/// Returns a variable; an empty one counts as unset, as in the XDG specification.
fn value(variable: &impl Fn(&str) -> Option<OsString>, name: &str) -> Option<OsString> {
    variable(name).filter(|value| !value.is_empty())
}

fn switch(variable: impl Fn(&str) -> Option<OsString>) -> Result<bool, SettingError> {
    match value(&variable, SWITCH) {
        Some(value) if value == "off" => Ok(false),
        Some(value) if value != "on" => Err(wrong(SWITCH, value, "`on` or `off`")),
        Some(_) | None => Ok(true),
    }
}

fn base(variable: impl Fn(&str) -> Option<OsString>) -> Result<Option<PathBuf>, SettingError> {
    match value(&variable, FOLDER) {
        Some(folder) if Path::new(&folder).is_absolute() => Ok(Some(PathBuf::from(folder))),
        Some(folder) => Err(wrong(FOLDER, folder, "an absolute path")),
        None => {
            // The XDG specification says to ignore relative paths.
            let absolute = |name| value(&variable, name).map(PathBuf::from).filter(|path| path.is_absolute());
            let caches = if cfg!(target_vendor = "apple") { "Library/Caches" } else { ".cache" };
            Ok(absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(caches))).map(|caches| caches.join("sdpa")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(all: &[(&str, &str)]) -> impl Fn(&str) -> Option<OsString> {
        |name| all.iter().find(|(there, _)| *there == name).map(|(_, value)| OsString::from(value))
    }

    #[test]
    fn the_folder_is_the_users_where_nothing_else_is_said() {
        let home = if cfg!(target_vendor = "apple") { "/home/u/Library/Caches/sdpa" } else { "/home/u/.cache/sdpa" };
        let is = |all: &[(&str, &str)], expected: &str| assert_eq!(base(variables(all)).unwrap(), Some(PathBuf::from(expected)));
        is(&[("HOME", "/home/u")], home);
        is(&[("HOME", "/home/u"), ("XDG_CACHE_HOME", "/x")], "/x/sdpa");
        is(&[("HOME", "/home/u"), ("XDG_CACHE_HOME", "relative")], home);
        is(&[("HOME", "/home/u"), ("XDG_CACHE_HOME", "")], home);
        is(&[("XDG_CACHE_HOME", "/x"), ("SDPA_CACHE_DIR", "/y")], "/y");
        is(&[("XDG_CACHE_HOME", "/x"), ("SDPA_CACHE_DIR", "")], "/x/sdpa");
        assert_eq!(base(variables(&[])), Ok(None));
    }

    #[test]
    fn the_switch_is_on_unless_it_says_off() {
        let is_on = |value: &str| switch(variables(&[(SWITCH, value)])).unwrap();
        assert_eq!((is_on("on"), is_on(""), is_on("off"), switch(variables(&[])).unwrap()), (true, true, false, true));
    }

    #[test]
    fn settings_without_a_meaning_are_told() {
        let told = switch(variables(&[(SWITCH, "0")])).unwrap_err().to_string();
        assert_eq!(told, r#"SDPA_CACHE: got "0", expected `on` or `off`"#);
        let told = base(variables(&[("HOME", "/home/u"), (FOLDER, "here")])).unwrap_err().to_string();
        assert_eq!(told, r#"SDPA_CACHE_DIR: got "here", expected an absolute path"#);
    }
}
