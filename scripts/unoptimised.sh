# shellcheck shell=bash
# unoptimised.sh: sourced where compiling counts and running does not. Sets `unoptimised`, options of cargo that take back what Cargo.toml optimises
# in the development profile, crate by crate: no environment variable does.
unoptimised=(--config profile.dev.opt-level=0 --config profile.dev.debug=false)
while read -r crate; do
  unoptimised+=(--config "profile.dev.package.$crate.opt-level=0")
done < <(sed -n '/^\[profile\.dev\.package\]/,/^\[/ s/^\([a-z0-9_-]*\) = .*opt-level.*/\1/p' Cargo.toml)
