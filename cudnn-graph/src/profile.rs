//! Device profiles: the properties of a device that a plan depends on, as cuDNN's own JSON. Plans can be built from a profile without the device.

use crate::error::Error;
use crate::ffi::codes::{Attribute, Kind};
use crate::ffi::descriptor::Descriptor;
use crate::ffi::{Handle, Library};
use sdpa_driver::{Device, relaxed};
use serde_json::{Map, Value};
use std::fmt;

/// The properties of a GPU, read from a device or from a file (from cuDNN 9.8 on).
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceProfile {
    json: Map<String, Value>,
}

/// Keys that differ between cards of one kind, or change at run time. Kernels do not depend on them.
const INCIDENTAL: [&str; 8] =
    ["pciDeviceId", "cudaDeviceId", "smClockRateKHz", "memClockRateKHz", "driverVer", "totalGlobalMem", "isTccDriver", "deviceName"];

/// Bundled profiles: see `devprops/README.md` for their origin.
const KNOWN: [(&str, &str); 4] = [
    ("a100", include_str!("../devprops/a100.json")),
    ("l40s", include_str!("../devprops/l40s.json")),
    ("h200", include_str!("../devprops/h200.json")),
    ("b200", include_str!("../devprops/b200.json")),
];

impl DeviceProfile {
    /// Parses a profile from JSON.
    ///
    /// # Errors
    /// Returns [`Error::Profile`] if the JSON is not an object, or if it lacks the name, the architecture or the number of SMs.
    pub fn from_json(text: &str) -> Result<DeviceProfile, Error> {
        let fail = |field: &str, rule: String| Error::Profile { field: field.to_owned(), rule };
        let json: Map<String, Value> = serde_json::from_str(text).map_err(|e| fail("JSON", format!("must be an object: {e}")))?;
        for key in ["deviceVer", "multiProcessorCount"] {
            if json.get(key).and_then(Value::as_u64).is_none_or(|n| n == 0) {
                return Err(fail(key, "must be a positive number".to_owned()));
            }
        }
        if !json.get("deviceName").is_some_and(Value::is_string) {
            return Err(fail("deviceName", "must be text".to_owned()));
        }
        Ok(DeviceProfile { json })
    }

    /// Returns a bundled profile by name: one of [`DeviceProfile::NAMES`].
    ///
    /// # Errors
    /// Returns [`Error::Profile`] for an unknown name.
    pub fn named(name: &str) -> Result<DeviceProfile, Error> {
        match KNOWN.iter().find(|(known, _)| *known == name) {
            Some((_, json)) => DeviceProfile::from_json(json),
            None => Err(Error::Profile { field: name.to_owned(), rule: format!("expected one of {}", DeviceProfile::NAMES.join(", ")) }),
        }
    }

    /// Names of the bundled profiles.
    pub const NAMES: [&str; 4] = ["a100", "l40s", "h200", "b200"];

    /// Returns the profile of a device in this machine.
    ///
    /// # Errors
    /// Returns a cuDNN error. Versions of cuDNN before 9.8 have no profiles.
    pub fn of_device(library: &'static Library, device: &'static Device) -> Result<DeviceProfile, Error> {
        let _entered = device.enter()?;
        let mut descriptor = Descriptor::new(library, Kind::DEVICEPROP)?;
        descriptor.set_i32(Attribute::DEVICEPROP_DEVICE_ID, device.ordinal() as i32)?;
        descriptor.finalize(device.name())?;
        DeviceProfile::from_json(&descriptor.get_text(Attribute::DEVICEPROP_JSON_REPRESENTATION)?)
    }

    fn number(&self, key: &str) -> u64 {
        self.json.get(key).and_then(Value::as_u64).unwrap_or(0)
    }

    /// Returns the name that the vendor gives the device.
    pub fn name(&self) -> &str {
        self.json.get("deviceName").and_then(Value::as_str).unwrap_or("")
    }

    /// Returns the device's compute capability, times ten: 90 for 9.0.
    pub fn sm(&self) -> u32 {
        (self.number("deviceVer") / 10) as u32
    }

    /// Returns the number of SMs of the device.
    pub fn sm_count(&self) -> u32 {
        self.number("multiProcessorCount") as u32
    }

    /// Returns whether both devices can use the same plans: all their properties except names, addresses, clocks and memory sizes are
    /// equal. Properties that one of the profiles lacks are ignored, because older libraries report fewer.
    pub fn same_kernels(&self, other: &DeviceProfile) -> bool {
        self.difference(other).is_none()
    }

    /// Returns the first property that prevents the devices from sharing plans: its name, its value in this profile, and its value in
    /// `other`.
    pub fn difference(&self, other: &DeviceProfile) -> Option<(&str, String, String)> {
        self.json
            .iter()
            .filter(|(key, _)| !INCIDENTAL.contains(&key.as_str()))
            .filter_map(|(key, value)| Some((key, value, other.json.get(key)?)))
            .find(|(_, here, there)| here != there)
            .map(|(key, here, there)| (key.as_str(), here.to_string(), there.to_string()))
    }

    pub(crate) fn descriptor(&self, library: &'static Library) -> Result<Descriptor, Error> {
        let mut descriptor = Descriptor::new(library, Kind::DEVICEPROP)?;
        descriptor.set_text(Attribute::DEVICEPROP_JSON_REPRESENTATION, &self.to_string())?;
        descriptor.finalize(self.name())?;
        Ok(descriptor)
    }
}

impl fmt::Display for DeviceProfile {
    /// Writes the profile as the JSON that cuDNN reads.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(&self.json).map_err(|_| fmt::Error)?)
    }
}

/// The device for which plans are made.
#[derive(Debug)]
pub enum Target<'a> {
    /// The device of a handle, which is present.
    Handle(&'a Handle<'a>),
    /// A device described by a profile, which need not be present.
    Profile(&'a DeviceProfile),
}

impl Target<'_> {
    /// Returns the compute capability of the device for which plans are made, times ten: 90 for 9.0.
    pub fn sm(&self) -> u32 {
        match self {
            Target::Handle(handle) => handle.device().sm(),
            Target::Profile(profile) => profile.sm(),
        }
    }

    /// Returns the number of SMs of the device for which plans are made.
    pub fn sm_count(&self) -> u32 {
        match self {
            Target::Handle(handle) => handle.device().sm_count(),
            Target::Profile(profile) => profile.sm_count(),
        }
    }

    /// Returns the device on which plans are loaded; `None` for a profile.
    pub(crate) fn device(&self) -> Option<&'static Device> {
        self.handle().map(Handle::device)
    }

    /// Runs a function that requests plans from cuDNN, in the context of the device and without disturbing captures.
    pub(crate) fn within<R>(&self, run: impl FnOnce() -> Result<R, Error>) -> Result<R, Error> {
        let _entered = self.device().map(Device::enter).transpose()?;
        relaxed(run)
    }

    pub(crate) fn handle(&self) -> Option<&Handle<'_>> {
        match self {
            Target::Handle(handle) => Some(handle),
            Target::Profile(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = r#"{"deviceName":"X","deviceVer":900,"multiProcessorCount":132,"smClockRateKHz":5}"#;

    #[test]
    fn facts_are_read_and_wrong_files_are_named() {
        let profile = DeviceProfile::from_json(SMALL).unwrap();
        assert_eq!((profile.name(), profile.sm(), profile.sm_count()), ("X", 90, 132));
        for (text, field) in
            [("[]", "JSON"), ("{}", "deviceVer"), (r#"{"deviceVer":900,"multiProcessorCount":"x"}"#, "multiProcessorCount")]
        {
            let Err(Error::Profile { field: found, .. }) = DeviceProfile::from_json(text) else { panic!("{text} was read") };
            assert_eq!(found, field);
        }
    }

    #[test]
    fn every_name_has_a_profile() {
        assert_eq!(KNOWN.map(|(name, _)| name), DeviceProfile::NAMES);
        for name in DeviceProfile::NAMES {
            assert!(DeviceProfile::named(name).unwrap().name().to_lowercase().contains(name), "{name}");
        }
        assert!(DeviceProfile::named("h300").is_err());
    }

    #[test]
    fn clocks_do_not_tell_devices_apart_and_architectures_do() {
        let profile = DeviceProfile::from_json(SMALL).unwrap();
        let slower = DeviceProfile::from_json(&SMALL.replace("\"smClockRateKHz\":5", "\"smClockRateKHz\":4")).unwrap();
        let other = DeviceProfile::from_json(&SMALL.replace("900", "1000")).unwrap();
        assert!(profile.same_kernels(&slower));
        assert!(!profile.same_kernels(&other));
        assert_eq!(profile.difference(&other), Some(("deviceVer", "900".to_owned(), "1000".to_owned())));
    }
}
