// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

// Names of the operations for which the owner measures how long their turns take. All other turns count as "other".
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
	// opCommit is the part of opChange and opFiles in which a change is written and synced.
	opCommit = "commit"
)
