// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package manifest

import (
	"fmt"
	"strings"
)

// Labels, annotations and values that have a meaning to Sluice.
const (
	labelServiceName = "kubernetes.io/service-name"
	labelOtherProxy  = "service.kubernetes.io/service-proxy-name"
	annotationRanges = "service.beta.kubernetes.io/load-balancer-source-ranges"
	none             = "None" // spec.clusterIP of a headless service

	// annotationAlgorithm selects the algorithm that chooses a backend of the service; the only value is "table".
	// Without it, the datapath uses its default.
	annotationAlgorithm = "sluice.io/load-balancing-algorithm"
	algorithmTable      = "table"
)

// checkLabel returns an error if a text is not a DNS label. Names of services must be DNS labels.
func checkLabel(s string) error {
	if len(s) > 63 {
		return fmt.Errorf("has %d characters, more than 63", len(s))
	}
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && (c != '-' || i == 0 || i == len(s)-1) {
			return fmt.Errorf("must consist of lowercase letters, digits and '-', and must not begin or end with '-'")
		}
	}
	if s == "" {
		return fmt.Errorf("is empty")
	}
	return nil
}

// checkSubdomain returns an error if a text is not a DNS subdomain. Names of slices must be DNS subdomains.
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
