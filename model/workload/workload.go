// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package workload defines terms for the workloads that get a network: the owner, the pod and the named ports.
//
// The CNI plugin links this package and runs for milliseconds, so nothing here compiles a regular expression at
// startup.
package workload

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"unicode"
)

// Limits of an owner.
const (
	MaxContainerID = 128 // bytes
	MaxInterface   = 15  // bytes: IFNAMSIZ without the terminator
)

// Owner identifies one attachment of a container to the network. The pair is unique on a node. Its JSON form is part
// of stored records.
type Owner struct {
	ContainerID string `json:"containerId"`   // as in CNI_CONTAINERID
	Interface   string `json:"interfaceName"` // as in CNI_IFNAME
}

// String returns "container/interface".
func (o Owner) String() string { return o.ContainerID + "/" + o.Interface }

// Compare orders owners by container, then by interface.
func (o Owner) Compare(p Owner) int {
	return cmp.Or(strings.Compare(o.ContainerID, p.ContainerID), strings.Compare(o.Interface, p.Interface))
}

// Key returns the file name of the owner: the SHA-256 of String in hexadecimal.
func (o Owner) Key() string {
	sum := sha256.Sum256([]byte(o.String()))
	return hex.EncodeToString(sum[:])
}

// OwnerError reports an invalid field of an owner.
type OwnerError struct {
	Field  string // "container_id" or "interface_name", as in the API
	Reason string
}

func (e *OwnerError) Error() string { return e.Field + ": " + e.Reason }

// Check returns an *OwnerError if the API does not accept the owner.
func (o Owner) Check() error {
	if !isContainerID(o.ContainerID) {
		return &OwnerError{"container_id", fmt.Sprintf(
			"%.80q is not a container ID: want 1 to %d letters, digits, '_', '.' and '-', a letter or digit first",
			o.ContainerID, MaxContainerID)}
	}
	if !IsInterface(o.Interface) {
		return &OwnerError{"interface_name", fmt.Sprintf(
			"%.80q is not an interface name: want 1 to %d bytes without '/', ':', NUL and white space",
			o.Interface, MaxInterface)}
	}
	return nil
}

// IsInterface reports whether s is a valid name of a network device.
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

// PodReference identifies the Kubernetes pod of a workload; it is zero without Kubernetes. Its JSON form is part of
// stored records.
type PodReference struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"` // differs between pods of the same name
}

// ManagerCNI is the manager of the endpoints that the CNI plugin creates, in the datapath's records. The plugin's GC
// considers only these endpoints.
const ManagerCNI = "cni"
