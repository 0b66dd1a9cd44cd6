// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

// Operations that the owner's time is counted by; the rest is "other".
const (
	opChange    = "change policies"
	opPrepare   = "prepare a change"
	opFiles     = "take over files"
	opIdentity  = "set identities"
	opSubscribe = "subscribe"
	opInterest  = "change subjects"
	opLearn     = "learn names"
	opRead      = "read"
	opDraft     = "copy references"
	opSweep     = "sweep"
	opLevel     = "divide limits"
	opOther     = "other"
	// opCommit is the write of a change with its sync, a part of opChange and opFiles.
	opCommit = "commit"
)
