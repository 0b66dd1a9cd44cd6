// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import "fmt"

// Difference is one deviation of the actual kernel state from the expected state.
type Difference struct {
	Subject string // "filter", "route", "sl_ip4"
	Key     string
	Want    string
	Have    string
}

// String formats the difference in one line.
func (d Difference) String() string {
	want, have := d.Want, d.Have
	if want == "" {
		want = "nothing"
	}
	if have == "" {
		have = "nothing"
	}
	return fmt.Sprintf("%s %s: expected %s, found %s", d.Subject, d.Key, want, have)
}

// Subjects of differences. For SubjectQdisc and SubjectFilter, packets may have bypassed the
// endpoint's programs; repairs of these are counted (OfAttachment).
const (
	SubjectQdisc  = "qdisc"
	SubjectFilter = "filter"
	// SubjectTCX is a tcx program that runs before Sluice's and may end the hook. It is only reported, because only
	// the owner of a bpf_link can detach the program of the link.
	SubjectTCX = "tcx program"
	// SubjectRootQdisc is a foreign root qdisc on a host end. Packets that the programs deliver
	// directly bypass it. It is only reported, because its owner may add it again.
	SubjectRootQdisc = "root qdisc"
	// SubjectDevice is the host end itself.
	SubjectDevice = "device"
)

// Repairable reports whether Links.RepairHost repairs the difference.
func (d Difference) Repairable() bool {
	return d.Subject != SubjectTCX && d.Subject != SubjectRootQdisc
}

// IsNoDevice reports whether the host end itself is missing.
func (d Difference) IsNoDevice() bool { return d.Subject == SubjectDevice && d.Have == "" }

// OfAttachment reports whether packets may have bypassed the endpoint's programs.
func (d Difference) OfAttachment() bool {
	return d.Subject == SubjectQdisc || d.Subject == SubjectFilter
}

// Finding is a difference and the result of its repair.
type Finding struct {
	Difference
	// Repaired is set if the repair succeeded.
	Repaired bool
	// Err is the error of a failed repair; nil if the repair succeeded or was not tried.
	Err error
}
