// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package manifest

import (
	"fmt"
	"strings"
)

// The labels and values that have a meaning here.
const (
	labelServiceName = "kubernetes.io/service-name"
	labelOtherProxy  = "service.kubernetes.io/service-proxy-name"
	annotationRanges = "service.beta.kubernetes.io/load-balancer-source-ranges"
	none             = "None" // spec.clusterIP of a headless service

	// annotationAlgorithm says how one of the service's backends is chosen: "table". Without
	// it, as the datapath chooses by default.
	annotationAlgorithm = "sluice.io/load-balancing-algorithm"
	algorithmTable      = "table"
)

// checkLabel says why a text is no label of DNS, as names of services are.
func checkLabel(s string) error {
	if len(s) > 63 {
		return fmt.Errorf("has %d characters, more than 63", len(s))
	}
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && (c != '-' || i == 0 || i == len(s)-1) {
			return fmt.Errorf("must be lowercase letters, digits and '-' between them")
		}
	}
	if s == "" {
		return fmt.Errorf("is empty")
	}
	return nil
}

// checkSubdomain says why a text is no name of DNS, as names of slices are.
func checkSubdomain(s string) error {
	if len(s) > 253 {
		return fmt.Errorf("has %d characters, more than 253", len(s))
	}
	for label := range strings.SplitSeq(s, ".") {
		if checkLabel(label) != nil {
			return fmt.Errorf("must be lowercase letters, digits, '-' and '.' between them")
		}
	}
	return nil
}
