// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

// Operations by which the owner's time is measured; the rest is "other".
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
	// opCommit is writing and syncing a change. It is part of opChange and opFiles.
	opCommit = "commit"
)
