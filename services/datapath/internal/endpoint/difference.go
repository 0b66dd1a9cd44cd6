// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import "fmt"

// Difference is one deviation of the kernel from what is recorded.
type Difference struct {
	Subject string // "filter", "route", "sl_ip4"
	Key     string
	Want    string
	Have    string
}

// String is the difference in one line.
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

// Subjects of differences that mean a container could have escaped its
// programs. Repairs of them are counted.
const (
	SubjectQdisc  = "qdisc"
	SubjectFilter = "filter"
	// SubjectTCX is a program that runs before ours and may end the hook. It is
	// only reported: whoever attached it may hold it by a link.
	SubjectTCX = "tcx program"
	// SubjectRootQdisc is a qdisc of others at the root of a host end. It sees nothing of
	// what programs deliver past it, and is only reported: whoever made it may make it
	// again.
	SubjectRootQdisc = "root qdisc"
	// SubjectDevice is the host end itself.
	SubjectDevice = "device"
)

// Repairable says whether Links.RepairHost acts on the difference.
func (d Difference) Repairable() bool {
	return d.Subject != SubjectTCX && d.Subject != SubjectRootQdisc
}

// IsNoDevice says whether the host end itself is gone.
func (d Difference) IsNoDevice() bool { return d.Subject == SubjectDevice && d.Have == "" }

// OfAttachment says whether a container could have escaped a program meanwhile.
func (d Difference) OfAttachment() bool {
	return d.Subject == SubjectQdisc || d.Subject == SubjectFilter
}

// Finding is a difference, and what became of it.
type Finding struct {
	Difference
	// Repaired is set if it was put right.
	Repaired bool
	// Err is why not, if that was tried.
	Err error
}
