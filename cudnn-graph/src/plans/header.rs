//! The header of a plan file: the cuDNN and device for which its plans were compiled.

use crate::profile::DeviceProfile;
use sdpa_cache::planfile::{Fault, Head};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The cuDNN, device and lowering for which all plans of a file were compiled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// The version of cuDNN, such as `9.19.0`.
    pub cudnn: String,
    /// The profile of the device, as JSON that [`DeviceProfile::from_json`] reads.
    pub profile: String,
    /// The version of the payloads, and of the lowering from problems to graphs where there is one.
    pub lowering: u32,
}

/// The reason why the plans of a file cannot be used in this process.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Mismatch {
    /// The file was written with another version of cuDNN.
    #[error("cudnn: the plan file was made for {file}, expected {here}")]
    Cudnn {
        /// The version of cuDNN with which the file was written.
        file: String,
        /// The version of cuDNN that this process uses.
        here: String,
    },
    /// The plans of the file are for another kind of device.
    #[error("device profile, {property}: the plan file was made for {file}, expected {here}")]
    Profile {
        /// The property that differs, or `JSON` if a profile cannot be parsed.
        property: String,
        /// The value of the property in the file, with the device name.
        file: String,
        /// The value of the property of this device, with the device name.
        here: String,
    },
    /// The file was written with another version of the lowering.
    #[error("version of the lowering: got {file} in the plan file, expected {here}; build the plans again with this release")]
    Lowering {
        /// The version of the lowering with which the file was written.
        file: u32,
        /// The version of the lowering in this release.
        here: u32,
    },
}

impl Header {
    /// Returns the reason why plans with this header cannot be used in a process with the header `here`; `None` if they can.
    pub fn mismatch(&self, here: &Header) -> Option<Mismatch> {
        if self.cudnn != here.cudnn {
            return Some(Mismatch::Cudnn { file: self.cudnn.clone(), here: here.cudnn.clone() });
        }
        if self.lowering != here.lowering {
            return Some(Mismatch::Lowering { file: self.lowering, here: here.lowering });
        }
        match (DeviceProfile::from_json(&self.profile), DeviceProfile::from_json(&here.profile)) {
            (Ok(file), Ok(here)) => unlike(&file, &here),
            (file, here) => {
                let tell = |side: Result<DeviceProfile, crate::Error>| side.map_or_else(|e| e.to_string(), |p| p.name().to_owned());
                Some(Mismatch::Profile { property: "JSON".to_owned(), file: tell(file), here: tell(here) })
            }
        }
    }
}

impl Head for Header {
    type Mismatch = Mismatch;

    fn mismatch(&self, here: &Header) -> Option<Mismatch> {
        Header::mismatch(self, here)
    }

    /// Merges the profiles of both headers, for a file with plans of both. A property that only one profile has then applies to all.
    fn joined(&self, other: &Header) -> Header {
        let map = |header: &Header| serde_json::from_str::<Map<String, Value>>(&header.profile).unwrap_or_default();
        let (mine, theirs) = (map(self), map(other));
        if theirs.keys().all(|key| mine.contains_key(key)) {
            return self.clone();
        }
        let mut all = theirs;
        all.extend(mine);
        Header { profile: Value::Object(all).to_string(), ..self.clone() }
    }

    fn check(&self) -> Result<(), Fault> {
        match DeviceProfile::from_json(&self.profile) {
            Ok(_) => Ok(()),
            Err(e) => Err(Fault::new("device profile", format!("invalid ({e})"), "the JSON of a device profile")),
        }
    }
}

fn unlike(file: &DeviceProfile, here: &DeviceProfile) -> Option<Mismatch> {
    if file.same_kernels(here) && here.same_kernels(file) {
        return None;
    }
    let (property, theirs, ours) = file.difference(here).unwrap_or_default();
    let beside = |value: String, profile: &DeviceProfile| format!("{value} ({})", profile.name());
    Some(Mismatch::Profile { property: property.to_owned(), file: beside(theirs, file), here: beside(ours, here) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(name: &str, sm: u32, more: &str) -> Header {
        let profile = format!(r#"{{"deviceName":"{name}","deviceVer":{sm},"multiProcessorCount":132{more}}}"#);
        Header { cudnn: "9.19.0".to_owned(), profile, lowering: 3 }
    }

    #[test]
    fn a_mismatch_names_the_field_and_both_values() {
        let file = header("X", 900, "");
        let cases = [
            (Header { cudnn: "9.21.0".to_owned(), ..file.clone() }, "cudnn: the plan file was made for 9.19.0, expected 9.21.0"),
            (
                Header { lowering: 4, ..file.clone() },
                "version of the lowering: got 3 in the plan file, expected 4; build the plans again with this release",
            ),
            (header("Y", 1000, ""), "device profile, deviceVer: the plan file was made for 900 (X), expected 1000 (Y)"),
        ];
        for (here, text) in cases {
            assert_eq!(file.mismatch(&here).unwrap().to_string(), text);
            assert!(here.mismatch(&file).is_some());
        }
    }

    #[test]
    fn clocks_and_spelling_do_not_matter() {
        let here = header("another card", 900, r#", "smClockRateKHz" : 7"#);
        assert_eq!(header("X", 900, "").mismatch(&here), None);
        assert_eq!(here.mismatch(&header("X", 900, "")), None);
    }

    #[test]
    fn a_profile_that_cannot_be_read_matches_nothing() {
        let unreadable = Header { profile: "{}".to_owned(), ..header("X", 900, "") };
        for (file, here) in [(&unreadable, &header("X", 900, "")), (&header("X", 900, ""), &unreadable), (&unreadable, &unreadable)] {
            let Some(Mismatch::Profile { property, .. }) = file.mismatch(here) else { panic!("{file:?} matches {here:?}") };
            assert_eq!(property, "JSON");
        }
        assert!(unreadable.check().is_err());
    }

    #[test]
    fn a_property_that_one_profile_lacks_counts_once_plans_of_both_are_in_a_file() {
        let (without, with, other) = (header("X", 900, ""), header("X", 900, r#","warpSize":32"#), header("X", 900, r#","warpSize":64"#));
        assert_eq!(without.mismatch(&other), None);
        for joined in [without.joined(&with), with.joined(&without)] {
            assert_eq!(joined.mismatch(&with), None);
            assert_eq!(joined.mismatch(&without), None);
            assert!(joined.mismatch(&other).is_some());
        }
        assert_eq!(with.joined(&without), with);
    }
}
