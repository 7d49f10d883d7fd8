//! Colours that remain distinguishable with colour blindness.

/// A colour: red, green and blue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Color(pub(super) u8, pub(super) u8, pub(super) u8);

pub(super) const INK: Color = Color(0x22, 0x22, 0x22);
pub(super) const GREY: Color = Color(0x66, 0x66, 0x66);
pub(super) const GRID: Color = Color(0xdd, 0xdd, 0xdd);
pub(super) const DROPPED: Color = Color(0xf0, 0xf0, 0xf0);
pub(super) const HATCH: Color = Color(0xc8, 0xc8, 0xc8);
/// Blue and vermilion of Okabe and Ito.
pub(super) const BLUE: Color = Color(0x00, 0x72, 0xb2);
pub(super) const VERMILION: Color = Color(0xd5, 0x5e, 0x00);

/// Viridis (van der Walt and Smith, 2015), sampled at every sixteenth of its range.
const VIRIDIS: [Color; 17] = [
    Color(68, 1, 84),
    Color(72, 21, 104),
    Color(72, 38, 119),
    Color(69, 55, 129),
    Color(63, 71, 136),
    Color(57, 86, 140),
    Color(50, 100, 142),
    Color(45, 113, 142),
    Color(40, 125, 142),
    Color(35, 138, 141),
    Color(31, 150, 139),
    Color(32, 163, 135),
    Color(60, 187, 117),
    Color(115, 208, 86),
    Color(160, 218, 57),
    Color(207, 225, 28),
    Color(253, 231, 37),
];

impl Color {
    /// Mixes in `part` of another colour.
    pub(super) fn toward(self, other: Color, part: f64) -> Color {
        let mix = |a: u8, b: u8| (f64::from(a) + (f64::from(b) - f64::from(a)) * part.clamp(0.0, 1.0)).round() as u8;
        Color(mix(self.0, other.0), mix(self.1, other.1), mix(self.2, other.2))
    }

    /// Returns the colour in the form `#rrggbb`.
    pub(super) fn hex(self) -> String {
        format!("#{:02x}{:02x}{:02x}", self.0, self.1, self.2)
    }
}

/// Returns the colour of a number between 0 and 1.
pub(super) fn viridis(x: f64) -> Color {
    let last = VIRIDIS.len() - 1;
    let place = x.clamp(0.0, 1.0) * last as f64;
    let at = (place as usize).min(last - 1);
    VIRIDIS[at].toward(VIRIDIS[at + 1], place - at as f64)
}
