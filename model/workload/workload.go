// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package workload holds the words about what gets a network: its owner, its
// pod and the names of its ports.
//
// The CNI plugin links it and lives for milliseconds, so nothing here compiles
// a pattern at the start of a process.
package workload

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"unicode"
)

// Bounds of an owner.
const (
	MaxContainerID = 128 // bytes
	MaxInterface   = 15  // bytes: IFNAMSIZ without the terminator
)

// Owner names one attachment of a container to the network: the pair is unique
// on a node. Its JSON form is part of stored records.
type Owner struct {
	ContainerID string `json:"containerId"`   // as in CNI_CONTAINERID
	Interface   string `json:"interfaceName"` // as in CNI_IFNAME
}

// String is "container/interface".
func (o Owner) String() string { return o.ContainerID + "/" + o.Interface }

// Compare orders owners by container, then by interface.
func (o Owner) Compare(p Owner) int {
	return cmp.Or(strings.Compare(o.ContainerID, p.ContainerID), strings.Compare(o.Interface, p.Interface))
}

// Key is the owner as a file name: the SHA-256 of String in hexadecimal.
func (o Owner) Key() string {
	sum := sha256.Sum256([]byte(o.String()))
	return hex.EncodeToString(sum[:])
}

// OwnerError says what is wrong with an owner.
type OwnerError struct {
	Field  string // "container_id" or "interface_name", as in the API
	Reason string
}

func (e *OwnerError) Error() string { return e.Field + ": " + e.Reason }

// Check returns an *OwnerError if the owner is not one that the API accepts.
func (o Owner) Check() error {
	if !isContainerID(o.ContainerID) {
		return &OwnerError{"container_id", fmt.Sprintf(
			"%.80q is no container id: want 1 to %d letters, digits, '_', '.' and '-', a letter or digit first",
			o.ContainerID, MaxContainerID)}
	}
	if !IsInterface(o.Interface) {
		return &OwnerError{"interface_name", fmt.Sprintf(
			"%.80q is no interface name: want 1 to %d bytes without '/', ':', NUL and white space",
			o.Interface, MaxInterface)}
	}
	return nil
}

// IsInterface reports whether the kernel could give a device this name.
func IsInterface(s string) bool {
	return s != "" && len(s) <= MaxInterface &&
		!strings.ContainsFunc(s, func(r rune) bool { return r == '/' || r == ':' || r == 0 || unicode.IsSpace(r) })
}

func isContainerID(s string) bool {
	for i := range len(s) {
		if !alphanumeric(s[i]) && (i == 0 || strings.IndexByte("_.-", s[i]) < 0) {
			return false
		}
	}
	return s != "" && len(s) <= MaxContainerID
}

func alphanumeric(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
}

// PodReference names the Kubernetes pod that a workload is; zero without
// Kubernetes. Its JSON form is part of stored records.
type PodReference struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"` // another pod of the same name has another one
}

// ManagerCNI is the manager of the endpoints that the CNI plugin makes, in the
// datapath's records: GC asks about the endpoints of the plugin alone.
const ManagerCNI = "cni"
